// Python in the page (worker.js): started by the first question, one for all that asks on a page.

export const near = (name) => new URL(name, import.meta.url).href;

export const python = {
  worker: null, waiting: new Map(), count: 0, ready: false, broken: "", generation: 0, watchers: new Set(),

  start() {
    if (this.worker || this.broken) return;
    this.generation += 1;
    this.began = performance.now();
    this.worker = new Worker(near("worker.js"), { type: "module" });
    this.worker.onerror = (event) => {
      event.preventDefault(); // it is told on the page
      this.fail("Python could not be loaded: reload the page to try again.");
    };
    this.worker.onmessage = ({ data }) => {
      if (data.broken) return this.fail(`Python could not be loaded (${data.broken}): reload the page to try again.`);
      if (data.ended) return this.stop(`This ended Python (${data.ended}); another one starts when it is needed.`);
      if (data.ready) {
        this.ready = true;
        document.documentElement.dataset.python = Math.round(performance.now() - this.began);
        return this.tell();
      }
      this.waiting.get(data.id)(JSON.parse(data.reply));
      this.waiting.delete(data.id);
    };
    this.tell();
  },

  ask(request) {
    this.start();
    if (this.broken) return Promise.resolve({ failed: this.broken });
    const id = ++this.count;
    this.worker.postMessage({ id, request: JSON.stringify(request) });
    return new Promise((done) => this.waiting.set(id, done));
  },

  // Whatever it does, it ends; widgets open again in the next one.
  stop(failed = "Stopped.") {
    this.worker?.terminate();
    this.worker = null;
    this.ready = false;
    for (const done of this.waiting.values()) done({ failed });
    this.waiting.clear();
    this.tell();
  },

  fail(why) {
    this.broken = why;
    this.stop(why);
  },

  tell() {
    for (const watch of this.watchers) watch();
  },
};
