// Python in a thread of its own: it takes requests and posts replies, both as in bridge.py.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const near = (name) => new URL(name, import.meta.url).href;
// Broken as soon as a file does not come, the engine's own too: it would wait for ever.
const lost = new Promise((_, refuse) => {
  const { fetch } = globalThis;
  globalThis.fetch = async (...asked) => {
    try {
      const reply = await fetch(...asked);
      if (!reply.ok) throw new Error(`${new URL(reply.url).pathname}: ${reply.status}`);
      return reply;
    } catch (error) {
      refuse(error);
      throw error;
    }
  };
});

async function start() {
  const library = fetch(near("pipelab.zip")).then((reply) => reply.arrayBuffer());
  const bridge = fetch(near("bridge.py")).then((reply) => reply.text());
  const python = await loadPyodide({ indexURL: near("pyodide/") });
  python.unpackArchive(await library, "zip");
  python.runPython(await bridge);
  return python.globals.get("answer");
}

const started = Promise.race([start(), lost]);
started.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error.message ?? error) }));

onmessage = async ({ data: { id, request } }) => {
  const answer = await started;
  try {
    postMessage({ id, reply: answer(request) });
  } catch (error) {
    postMessage({ ended: String(error.message ?? error).trim().split("\n").at(-1) }); // no Python is left
  }
};
