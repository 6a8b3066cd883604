// Every schedule made, validated and simulated by Python in WebAssembly, where there is no numpy, and
// a puzzle solved:
//   node tests/house/pyodide.mjs FOLDER_OF_NODE_MODULES [DEVICES MICROBATCHES]
// Prints JSON: schedule -> [makespan, milliseconds of the quickest of three], and what loading took.
import { pathToFileURL, fileURLToPath } from "node:url";
import path from "node:path";

const [modules, devices = "4", microbatches = "8"] = process.argv.slice(2);
const repository = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../..");
const { loadPyodide } = await import(
  pathToFileURL(path.resolve(modules, "pyodide/pyodide.mjs")).href
);

const start = performance.now();
const pyodide = await loadPyodide();
const loaded = performance.now() - start;
pyodide.FS.mkdirTree("/repository");
pyodide.FS.mount(pyodide.FS.filesystems.NODEFS, { root: repository }, "/repository");
let found;
try {
  found = pyodide.runPython(`
import json, sys, time

sys.path.insert(0, "/repository")
sys.dont_write_bytecode = True
start = time.perf_counter()
import pipelab

imported = 1000 * (time.perf_counter() - start)


def timed(name):
    start = time.perf_counter()
    schedule = pipelab.make(name, ${devices}, ${microbatches})
    pipelab.validate(schedule)
    timeline = pipelab.simulate(schedule)
    return timeline.makespan, 1000 * (time.perf_counter() - start)


found = {name: min((timed(name) for _ in range(3)), key=lambda run: run[1]) for name in pipelab.SCHEDULES}
from pipelab.editor import puzzle

solved = puzzle.recognise(puzzle.finish(puzzle.Draft.of(puzzle.LEVELS["first"].task)))
assert not {"numpy", "anywidget", "matplotlib"} & {*sys.modules}
json.dumps({"python": sys.version.split()[0], "import_ms": imported, "schedules": found, "solved": solved})
`);
} catch (error) {
  console.error(error.message); // Python's traceback, without that of the engine
  process.exit(1);
}
console.log(JSON.stringify({ load_ms: loaded, ...JSON.parse(found) }));
