// Python in a thread of its own: it takes requests and posts replies, both as in bridge.py.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const near = (name) => new URL(name, import.meta.url).href;
const fetched = async (name) => {
  const reply = await fetch(near(name));
  if (!reply.ok) throw new Error(`${name}: ${reply.status}`);
  return reply;
};

async function start() {
  const library = fetched("pipelab.zip").then((reply) => reply.arrayBuffer());
  const bridge = fetched("bridge.py").then((reply) => reply.text());
  const python = await loadPyodide({ indexURL: near("pyodide/") });
  python.unpackArchive(await library, "zip");
  python.runPython(await bridge);
  return python.globals.get("answer");
}

const started = start();
started.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error.message ?? error) }));

onmessage = async ({ data: { id, request } }) => {
  const answer = await started;
  try {
    postMessage({ id, reply: answer(request) });
  } catch (error) {
    postMessage({ ended: String(error.message ?? error).trim().split("\n").at(-1) }); // no Python is left
  }
};
