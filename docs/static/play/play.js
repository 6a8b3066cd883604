// What lives on a page of the site: widgets and exercises, with Python in the page where it is touched.
//
// A widget stands there as its notebook stored it, drawn by the same front end as in JupyterLab. The first
// touch starts Python (worker.js), which is then the model's other side, as a kernel is in a notebook.

import { near, python } from "./python.js";

const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const PLAYED = "pipelab-played"; // levels that were won on this site, here or on its front page

const able = () => typeof WebAssembly === "object" && typeof Worker === "function";
const served = () => location.protocol !== "file:";

// Why the page stays as it is, or "".
function obstacle(node) {
  if (node.dataset.python !== "yes") return "These pages were made without Python in them: the picture is a stored one.";
  if (!able()) return "This browser has no WebAssembly, so the picture stays as it is. In JupyterLab it can be changed.";
  if (!served()) return "Opened from a folder, a page cannot start Python: serve the folder (python -m http.server) to change the picture.";
  return python.broken && `${python.broken} The picture is a stored one.`;
}

// ---- a widget's model, with the methods that a front end knows from JupyterLab

class Model {
  constructor(name, kind, state) {
    Object.assign(this, { name, kind, state, reactions: {}, dirty: new Set(), messages: [], generation: 0, busy: false });
    this.drawn = state.settings; // of an explorer: those that its picture shows
    this.stored = { ...state }; // what the page came with
    this.coming = ""; // what was asked for, where the picture is another one
    this.epoch = 0; // replies to what was asked in an earlier one come too late
  }

  get(key) { return this.state[key]; }
  on(event, react) { (this.reactions[event] ??= []).push(react); }
  off(event, react) { this.reactions[event] = (this.reactions[event] ?? []).filter((other) => other !== react); }

  set(key, value) {
    this.state[key] = value;
    this.dirty.add(key);
    this.emit(key);
  }

  emit(key) {
    for (const react of this.reactions[`change:${key}`] ?? []) react();
  }

  take(state) {
    for (const key of Object.keys(state)) if (!this.dirty.has(key)) this.state[key] = state[key];
    for (const key of Object.keys(state)) this.emit(key);
  }

  save_changes() { this.go(); }
  send(content) {
    if (content.do === "open_level" && this.visit) return this.visit(content.name);
    this.messages.push(content);
    this.go();
  }

  // A picture that was drawn before, in place of the one that is shown; Python, if it is there, opens it anew.
  put(state) {
    Object.assign(this.state, state);
    this.drawn = this.state.settings;
    this.renew([]);
    for (const key of Object.keys(state)) this.emit(key);
    this.emit("idle");
  }

  renew(messages) {
    this.dirty.clear();
    Object.assign(this, { messages, generation: 0, epoch: this.epoch + 1, coming: "" });
  }

  // One request after the other; of changes made meanwhile only the last counts.
  async go() {
    if (this.busy) return;
    this.busy = true;
    this.emit("idle");
    while (this.dirty.size || this.messages.length) {
      const { epoch } = this, reply = await this.next();
      if (epoch !== this.epoch) continue;
      if (reply.failed) {
        this.messages.length = 0;
        break;
      }
      this.coming = "";
      this.take(reply.state);
    }
    this.busy = false;
    this.emit("idle");
  }

  async next() {
    python.start();
    if (this.generation !== python.generation) {
      const opened = await this.open();
      if (opened.failed) return opened;
    }
    if (this.messages.length) return python.ask({ do: "send", widget: this.name, content: this.messages.shift() });
    const values = Object.fromEntries([...this.dirty].map((key) => [key, this.state[key]]));
    this.dirty.clear();
    const reply = await python.ask({ do: "set", widget: this.name, values });
    if (reply.failed) for (const key of Object.keys(values)) this.dirty.add(key); // for the next Python
    if (reply.state?.drawing) this.drawn = values.settings;
    return reply;
  }

  // The widget on Python's side, as it stands here.
  async open() {
    const { generation } = python, { view } = this.state;
    const state = this.kind === "explorer" ? this.drawn : { table: view.link, help: view.help, helped: view.helped, won: played() };
    const reply = await python.ask({ do: "open", widget: this.name, kind: this.kind, state });
    if (!reply.failed) this.generation = generation;
    if (reply.state && this.kind === "explorer") this.take(reply.state);
    return reply;
  }
}

const played = () => {
  try {
    return JSON.parse(localStorage.getItem(PLAYED)) ?? {};
  } catch {
    return {}; // a browser that stores nothing
  }
};

function keep(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // then it is forgotten with the page
  }
}

// ---- widgets

async function show(node, number) {
  const { kind } = node.dataset, state = JSON.parse(node.querySelector("script").textContent);
  const model = new Model(`${kind}-${number}`, kind, state), page = pages[kind];
  const front = await import(near(`${kind}.js`)), el = make("div");
  const note = make("p", { className: "play-note", role: "status" });
  if (node.dataset.page) await page.read(model);
  node.replaceChildren(note, el);
  front.default.render({ model, el });
  if (kind === "derivation") return note.remove(); // it asks Python for nothing
  const told = () => {
    const why = obstacle(node), loading = python.worker && !python.ready && touched;
    node.classList.toggle("jupyter-widgets-disconnected", Boolean(why));
    node.classList.toggle("coming", Boolean(model.coming));
    node.classList.toggle("starting", !why && model.generation === 0 && Boolean(model.dirty.size || model.messages.length));
    const working = model.busy && python.ready, stop = make("button", { type: "button", textContent: "Stop", onclick: () => python.stop() });
    note.hidden = !why && !loading && !working && !model.coming;
    note.classList.toggle("late", working); // seen only when it takes its time
    const runs = python.waiting.size > 1 ? "Something else on this page still runs …" : page.takes?.(model) ?? "Computing …";
    const doing = working ? [runs, make("progress"), stop] : ["Python is starting; your input is kept …", make("progress")];
    const coming = model.coming && !why ? [`${model.coming} comes: `] : [];
    note.replaceChildren(...(why ? [why] : [...coming, ...doing]));
  };
  let touched = false;
  const touch = () => {
    if (obstacle(node)) return;
    touched = true;
    python.start();
    told();
  };
  for (const event of ["pointerdown", "focusin"]) el.addEventListener(event, touch, { once: true });
  python.watchers.add(told);
  model.on("change:idle", told);
  told();
  page.shown?.(node, el, model);
  if (node.dataset.page) {
    page.live(node, el, model);
    if (model.dirty.size || model.messages.length) touch(), obstacle(node) || model.go();
  }
}

// What the explorer's page begins with: its address names what differs.
const PLAIN = { compare: "", virtual: 1, batches: 1, memory: "", recompute: "never", forward: "1", input_grad: "1", weight_grad: "1",
  update: "0", transfer: "0", weights: "2", optimizer: "4", activations: "1", boundary: "0.25", host: "1" };

const COUNTS = ["devices", "microbatches", "virtual", "batches"]; // numbers; all else is text

const SEARCHED = { zb_v: [5, 1.6], zb: [3, 0.8] }; // seconds for 1024 = devices x micro-batches, and with which power they grow
const FIRST = "pipelab-first"; // the explorer's last picture, and where it belongs

// A picture that was drawn when the site was made, or nothing.
async function drawn(name) {
  try {
    return (await (await fetch(near("first.json"))).json())[name];
  } catch {
    return null;
  }
}

// Its settings in the address, such as #schedule=interleaved&devices=8; those that are not there are the plain ones.
const explorer = {
  async read(model) {
    const hash = location.hash.slice(1), last = remembered(FIRST), { stored } = model;
    const told = [...new URLSearchParams(hash)].filter(([key]) => key in stored.settings);
    if (hash && !told.length && document.getElementById(hash)) return; // a place on the page
    const settings = told.length ? { ...stored.settings, ...PLAIN } : stored.settings;
    for (const [key, text] of told) settings[key] = COUNTS.includes(key) && text.trim() && !isNaN(text) ? +text : text;
    const same = (other) => JSON.stringify(settings) === JSON.stringify(other);
    if (same(model.drawn) && !model.dirty.size) return;
    const made = document.querySelector("[data-made]").dataset.made;
    const mine = last?.made === made && same(last.settings) && last;
    const found = same(stored.settings) ? stored : mine || (await drawn(`explorer-${hash}`));
    if (location.hash.slice(1) !== hash) return; // meanwhile another one was asked for
    if (found) return model.put({ settings, drawing: found.drawing, error: "" });
    Object.assign(model.state, { settings });
    model.dirty.add("settings");
    model.coming = `${settings.schedule} on ${settings.devices} devices`;
  },

  // What is said while it is computed: a search for a large table takes long.
  takes(model) {
    const { schedule, compare, devices, microbatches } = model.get("settings"), size = devices * microbatches;
    const [seconds, name] = [schedule, compare].filter((one) => one in SEARCHED).map((one) => {
      const [least, power] = SEARCHED[one];
      return [least * (size / 1024) ** power, one];
    }).sort().at(-1) ?? [0];
    return seconds > 3 ? `${name} searches for its table: about ${+seconds.toPrecision(1)} s …` : "Computing …";
  },

  shown(node, el, model) {
    const get = (kind, end, type) => async () => {
      if (model.generation !== python.generation || !python.ready) {
        const opened = await model.open();
        if (opened.failed) return;
      }
      const { text } = await python.ask({ do: "export", widget: model.name, kind });
      if (text) save(new Blob([text], { type }), `${nameOf(model)}.${end}`);
    };
    const button = (textContent, onclick) => make("button", { type: "button", textContent, onclick });
    const away = make("div", { className: "bar take-away" }, make("span", {}, "Download"),
      button("PNG", async () => save(await png(el.querySelector("svg")), `${nameOf(model)}.png`)),
      button("CSV", get("csv", "csv", "text/csv")), button("Chrome trace", get("trace", "json", "application/json")));
    if (node.dataset.page) away.append(button("Copy link", (event) => copy(location.href, event.target)));
    else away.append(make("a", { href: this.address(node, model), textContent: "On a page of its own" }));
    el.querySelector(".pipelab-explorer .picture").append(away);
    const link = away.querySelector("a"), { made } = node.dataset;
    const hand = () => keep(FIRST, { made, settings: model.drawn, drawing: model.get("drawing") });
    if (link) model.on("change:settings", () => (link.href = this.address(node, model)));
    if (link) for (const event of ["pointerdown", "focus"]) link.addEventListener(event, hand);
    else model.on("change:drawing", hand);
  },

  address(node, model) {
    return `${new URL(node.dataset.home, location.href).href}#${this.written(model.get("settings"), PLAIN)}`;
  },

  written(settings, plain) {
    const always = ["schedule", "devices", "microbatches"];
    const chosen = Object.entries(settings).filter(([key, value]) => always.includes(key) || value !== plain[key]);
    return new URLSearchParams(chosen.map(([key, value]) => [key, value ?? ""]));
  },

  live(node, el, model) {
    const write = () => model.dirty.has("settings") && history.replaceState(null, "", `#${this.written(model.get("settings"), PLAIN)}`);
    model.on("change:settings", write);
    addEventListener("hashchange", async () => {
      await this.read(model);
      model.emit("settings");
      if (model.dirty.size) model.go();
    });
  },
};

// A level in the address (#cap), or a table of one's own (#own), as it was left there; every one keeps its board.
const OWN = "own", BOARDS = "pipelab-boards";
const editor = {
  async read(model) {
    if (location.hash.startsWith("#pipelab=")) return void (model.coming = "The table of this link"); // the front end reads it
    const { levels, level } = model.stored.view, boards = remembered(BOARDS) ?? {};
    const hash = location.hash.slice(1), name = !hash || document.getElementById(hash) ? boards.last ?? level.name : hash;
    if (name !== OWN && !levels.some(([other]) => other === name)) return void model.messages.push({ do: "open_level", name });
    const board = boards[name] ?? {}, link = board.link ?? `#pipelab=level=${name}&table=${board.table ?? ""}`;
    const { made } = document.querySelector("[data-made]").dataset, { help } = model.get("view");
    const found = board.made === made ? board.view : board.table || name === OWN ? null : name === level.name ? model.stored.view : (await drawn(`editor-${name}`))?.view;
    if (location.hash.slice(1) !== hash) return; // meanwhile another one was asked for
    if (found) return model.put({ view: { ...this.marked(found), help } });
    Object.assign(model.state, { view: { ...model.get("view"), link, helped: board.helped ?? false } });
    model.renew([{ do: "show" }]);
    model.coming = name === OWN ? "Your table" : `The level ${levels.find(([other]) => other === name)[1]}`;
  },

  shown(node, el, model) {
    model.on("change:view", () => {
      const won = model.get("view").levels.filter(([, , mark]) => mark).map(([name, , mark]) => [name, mark]);
      keep(PLAYED, { ...played(), ...Object.fromEntries(won) });
    });
    const link = el.querySelector("[name=link]"), home = new URL(node.dataset.home, location.href).href;
    const there = () => (link.value = home + model.get("view").link);
    model.on("change:view", there);
    there();
  },

  // With what was won before in the list of levels.
  marked(view) {
    const won = played(), levels = view.levels.map(([name, title, mark]) => [name, title, mark || (won[name] ?? "")]);
    return { ...view, levels };
  },

  live(node, el, model) {
    const go = async () => {
      if (location.hash.startsWith("#pipelab=")) model.send({ do: "load", text: location.hash });
      else if (await this.read(model), model.messages.length) model.go();
    };
    model.visit = (name) => {
      history.pushState(null, "", `#${name}`);
      go();
    };
    model.on("change:view", () => {
      const view = model.get("view"), name = view.level.name || OWN, { made } = node.dataset, { link, helped } = view;
      if (model.coming) return;
      keep(BOARDS, { ...remembered(BOARDS), last: name, [name]: { table: link.split("table=")[1], link, helped, made, view } });
      if (location.hash !== `#${name}`) history[location.hash.length > 1 ? "pushState" : "replaceState"](null, "", `#${name}`);
    });
    addEventListener("hashchange", go);
  },
};
const pages = { explorer, editor };

function remembered(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

// ---- what is taken away

const nameOf = (model) => {
  const { schedule, compare, devices, microbatches } = model.drawn;
  return [schedule, compare, `p${devices}`, `m${microbatches}`].filter(Boolean).join("-");
};

function save(blob, download) {
  const href = URL.createObjectURL(blob);
  make("a", { href, download }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    prompt("The link:", text);
  }
  setTimeout(() => (button.textContent = label), 1500);
}

// The picture as it is seen, at twice its size: styles go with it, and the page's colour lies below.
async function png(svg) {
  const twin = svg.cloneNode(true), [from, to] = [svg, twin].map((root) => [root, ...root.querySelectorAll("*")]);
  const kept = ["fill", "stroke", "stroke-width", "opacity", "display", "font-size", "font-weight", "font-family", "text-anchor"];
  from.forEach((node, k) => {
    const style = getComputedStyle(node);
    for (const name of kept) to[k].style.setProperty(name, style.getPropertyValue(name));
  });
  twin.querySelector(".names").removeAttribute("transform"); // however far it is scrolled
  twin.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const [width, height] = ["width", "height"].map((name) => 2 * svg.getAttribute(name));
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(twin))}`;
  await image.decode();
  const canvas = make("canvas", { width, height }), brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(svg).backgroundColor;
  brush.fillRect(0, 0, width, height);
  brush.drawImage(image, 0, 0, width, height);
  return new Promise((done) => canvas.toBlob(done));
}

// ---- exercises: a cell to write in, and what its check says

const LONG = 5000; // milliseconds
const LATE = "This still runs. If a loop has no end, press Stop: that ends Python, and the next check starts it again.";

// Words wrap; the lines of a table stay whole, and scroll.
function spaced(text) {
  const lines = text.split("\n"), isRow = (line) => line.trim().split(/\s+/).every((cell) => /^(\.|>?\d+[A-Z]\d.*)$/.test(cell));
  const first = lines.findIndex(isRow), last = lines.findLastIndex(isRow) + 1;
  if (first < 0) return [text];
  const pieces = [lines.slice(0, first), lines.slice(first, last), lines.slice(last)].map((part) => part.join("\n"));
  return [pieces[0], make("div", { className: "unwrapped" }, pieces[1]), pieces[2]];
}

function exercise(node) {
  const { before, cell } = JSON.parse(node.querySelector("script").textContent), { name } = node.dataset;
  if (obstacle(node)) return;
  const shown = node.closest(".cell").querySelector(".cell_input"), stored = remembered(`pipelab-${name}`);
  const text = make("textarea", { value: stored ?? cell, spellcheck: false, ariaLabel: `your answer to ${name}`, autocapitalize: "off" });
  const said = make("div", { className: "said", role: "status", ariaLive: "polite" }, node.querySelector(".said").textContent);
  const check = make("button", { type: "button", className: "check", textContent: "Check", title: "Ctrl+Enter", onclick: run });
  const again = make("button", { type: "button", textContent: "Start again", onclick: () => ((text.value = cell), grow(), keep(`pipelab-${name}`, null)) });
  const bar = make("div", { className: "bar" }, check, again);
  let running = false, late = 0; // the timer for a check that takes long

  // What a check waits for; after a while, that it may have no end.
  const tell = () => {
    if (!running) return;
    const begun = python.waiting.size > 1 ? "Waiting for something else on this page, which still runs. Stop ends both." : "Checking …";
    said.replaceChildren(python.ready ? begun : "Python is starting …");
    if (python.ready) late ||= setTimeout(() => said.replaceChildren(LATE), LONG);
  };
  python.watchers.add(tell);

  const grow = () => (text.rows = Math.max(2, text.value.split("\n").length));
  text.oninput = () => (grow(), keep(`pipelab-${name}`, text.value));
  text.onfocus = () => python.start();
  text.onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || event.shiftKey) return run();
    const line = text.value.slice(0, text.selectionStart).split("\n").at(-1);
    const indent = line.match(/^ */)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : "");
    text.setRangeText(`\n${indent}`, text.selectionStart, text.selectionEnd, "end");
    text.oninput();
  };

  async function run() {
    if (running) return python.stop(); // the button says "Stop" then
    running = true;
    check.textContent = "Stop";
    said.className = "said";
    const asked = python.ask({ do: "check", before, cell: text.value });
    tell();
    const { passed, text: words, folded, failed } = await asked;
    running = false;
    late = clearTimeout(late);
    check.textContent = "Check";
    said.className = `said ${passed ? "right" : passed === false || failed ? "wrong" : ""}`;
    said.replaceChildren(...spaced(failed ?? words));
    if (folded) said.append(make("details", {}, make("summary", {}, "Show it"), folded));
  }

  grow();
  shown.replaceWith(text);
  node.replaceChildren(bar, said);
}

// ---- pictures that are too small on a phone: a tap shows one as wide as it was drawn

function enlarge(image) {
  const box = make("dialog", { className: "enlarged", ariaLabel: image.alt, onclick: () => box.close(), onclose: () => box.remove() });
  box.onkeydown = ({ key }) => void (key === "Escape" && box.close());
  box.append(make("img", { src: image.src, alt: image.alt }));
  document.body.append(box);
  box.showModal();
}

for (const image of document.querySelectorAll("article img")) {
  if (image.closest("a, noscript")) continue;
  Object.assign(image, { tabIndex: 0, title: "Enlarge", onclick: () => enlarge(image) });
  image.onkeydown = ({ key }) => void (key === "Enter" && enlarge(image)); // false would cancel every other key
}
// What a search shows of a page is from its article, not from the buttons above.
if (typeof Search !== "undefined") {
  const textOf = Search.htmlToText;
  Search.htmlToText = (text, anchor) => {
    const page = new DOMParser().parseFromString(text, "text/html"), article = page.querySelector("article");
    if (article) page.querySelector("main").replaceChildren(article);
    return textOf.call(Search, page.documentElement.outerHTML, anchor);
  };
}
for (const node of document.querySelectorAll(".pipelab-exercise[data-name]")) exercise(node);
document.querySelectorAll(".pipelab-play").forEach(show);
