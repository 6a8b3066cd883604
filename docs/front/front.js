// The front page: a level that is played at once. The rules are rules.js, above; Python starts only for the coach and a
// proof, and is then the editor's (python.js, bridge.py).

const LEFT = 20, LANE = 30, GAP = 7, TOP = 2, AXIS = 16, LEAST = 11; // pixels; of the shortest action
const FIRST = "solver", BOARDS = "pipelab-boards", PLAYED = "pipelab-played";
const STARS = { own: "✓ ", helped: "○ " };
const ENDING = 1.6; // seconds
const SQUARES = 14; // in a row that is shared, at most
const COUNT = ["No", "One", "Two", "Three", "Four", "Five", "Six"];

const levels = JSON.parse(document.getElementById("data").textContent), names = Object.keys(levels);
const $ = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const number = (x) => String(+x.toPrecision(5));
const plain = (text) => (level.stages > task.devices ? text : text.replace(/\b\d+([FBIWU]\d)/g, "$1")).replace(/\b[Dd]evice/g, "GPU");
const firstText = $.text.innerHTML;

function remembered(key) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? {};
  } catch {
    return {}; // a browser that stores nothing
  }
}

function keep(key, changes) {
  try {
    localStorage.setItem(key, JSON.stringify({ ...remembered(key), ...changes }));
  } catch {
    // then it is forgotten with the page
  }
}

let name, level, task, rows, helped, past, keys, times; // times: of the rows, once they are drawn
let chosen = null; // {device, index, gap}: the action at this index of a row, or the gap before it

// ---- words

const gpu = (device) => `GPU ${device}`;
const short = (a) => (level.stages > task.devices ? task.actions[a] : task.kind[a] + task.microbatch[a]);
const held = (device) => heldIn(task, rows[device]).at(-1) ?? 0;
const won = () => isWhole(task, rows) && times.makespan <= level.par * (1 + 1e-9);

// Why an action cannot be placed, for somebody who has read the first screen only.
function refusal(a, { why, need, device }) {
  const me = short(a), here = gpu(task.device[a]), other = need === undefined ? "" : short(need);
  if (why === "full") return `${gpu(device)} is full: it holds ${task.cap(device)} micro-batches. A ${task.releases} there makes room for the next.`;
  if (why === "stuck") return `With ${me} here, no micro-batch could get all the way and back: half-done ones would take all the room.`;
  if (why === "circle") return `Here ${me} would never start: it would wait for something that waits for it.`;
  if (why === "late") return need === undefined ? `${me} does not fit into this gap.` : `${me} comes too late for this gap: it waits for ${other} on ${gpu(task.device[need])}, which ends at ${number(times.end.get(need))}.`;
  if (task.kind[need] === "U") {
    const why = task.kind[a] === "F" ? "needs new weights" : "must not mix with gradients of before";
    return `${me} ${why}: first comes the update ${other} on ${here}.`;
  }
  if (task.kind[a] === "U") return `${me} needs all gradients of its micro-batches: ${other} is missing.`;
  if (task.device[need] !== task.device[a]) {
    const from = gpu(task.device[need]), what = task.kind[need] === "F" ? "its input" : "the gradient";
    return `${me} on ${here} needs ${what} from ${from}, which has not done ${other} yet.`;
  }
  if (task.kind[need] === task.kind[a]) return `${me} belongs to the same sequence as ${other}, which comes first.`;
  return task.kind[need] === "F" ? `${here} has not done ${other} yet: forward comes before backward.` : `${me} uses what ${other} finds: do ${other} on ${here} first.`;
}

function less(took) {
  const by = +(took - level.par).toPrecision(5);
  return by === 1 ? "One less is possible." : `${COUNT[by] ?? number(by)} less are possible.`;
}

function state() {
  const count = rows.flat().length, of = task.actions.length;
  if (!count) return [""];
  if (count < of) return [`${count} of ${of} placed. So far it ends at ${number(times.makespan)}; par is ${number(level.par)}.`];
  if (!won()) return [`${number(times.makespan)}. ${less(times.makespan)}`];
  const who = name === FIRST ? "Nobody can do better: a solver has proved it." : "Nobody can do better.";
  return [`${number(level.par)}. ${who}${helped ? " (The coach helped.)" : ""}`, "won"];
}

function say(text, mood = "") {
  $.said.textContent = plain(text);
  $.said.className = mood;
}

// ---- the picture

// What stands in a row: actions, and the gaps before them.
function cellsOf(device) {
  let free = 0;
  return rows[device].flatMap((a, index) => {
    const from = times.start.get(a), until = times.end.get(a), gap = { index, gap: true, from: free, until: from };
    const idle = from - task.wait > free + 1e-9;
    free = until;
    return [...(idle ? [gap] : []), { a, index, gap: false, from, until }];
  });
}

const isChosen = (device, cell) => chosen?.device === device && chosen.index === cell.index && chosen.gap === cell.gap;

function draw(fresh = null, ending = false) {
  const width = Math.max($.scroller.clientWidth, 200), unit = Math.min(...task.seconds.filter(Boolean));
  const end = Math.max(level.par, ...times.end.values()) + unit / 4;
  const scale = Math.max((width - LEFT - 2) / end, LEAST / unit), x = (time) => LEFT + time * scale;
  const bottom = TOP + task.devices * (LANE + GAP), wide = Math.round(x(end)) + 1;
  const step = [1, 2, 5, 10, 20].find((n) => n * scale >= 34), lines = [];
  for (let t = 0; t <= end; t += step) {
    lines.push(`<path class="grid" d="M${x(t)} ${TOP}V${bottom}"/><text x="${x(t) + (t ? 0 : 4)}" y="${bottom + 12}">${t}</text>`);
  }
  const lanes = rows.map((row, d) => {
    const y = TOP + d * (LANE + GAP), cells = cellsOf(d);
    const boxes = cells.filter(({ gap }) => !gap).map(({ a, from, until }) => {
      const w = (until - from) * scale, [fill, ink] = level.colours[task.stage[a] + task.kind[a]];
      const room = (text) => Math.min(13, (w - 2) / (0.75 * String(text).length));
      const text = room(short(a)) < 9 ? task.microbatch[a] : short(a); // the colour says the rest
      const style = ending ? `style="animation-delay:${((ENDING * from) / times.makespan).toFixed(2)}s"` : "";
      return `<g class="box ${a === fresh ? "new" : ""}" ${style}><rect x="${x(from) + 0.5}" y="${y}" width="${Math.max(w - 1, 1)}" height="${LANE}" rx="3" fill="${fill}"/>
        <text x="${x(from) + w / 2}" y="${y + LANE / 2 + 4}" style="fill:${ink};font-size:${room(text)}px">${text}</text></g>`;
    });
    const mark = cells.filter((cell) => isChosen(d, cell)).map(({ gap, from, until }) =>
      `<rect class="chosen ${gap ? "gap" : ""}" x="${x(from)}" y="${y - 1}" width="${(until - from) * scale}" height="${LANE + 2}" rx="3"/>`);
    return `<rect class="lane" x="${LEFT}" y="${y}" width="${wide - LEFT}" height="${LANE}" rx="3"/>${boxes.join("")}${mark.join("")}
      <text x="8" y="${y + LANE / 2 + 4}">${d}</text>`;
  });
  $.board.setAttribute("width", wide);
  $.board.setAttribute("height", bottom + AXIS);
  $.board.classList.toggle("ending", ending);
  $.board.innerHTML = `${lines.join("")}${lanes.join("")}<path class="par" d="M${x(level.par)} ${TOP - 2}V${bottom}"/>`;
  const seen = $.scroller.scrollLeft + width, until = fresh === null ? 0 : x(times.end.get(fresh));
  if (until > seen || until < $.scroller.scrollLeft + 60) $.scroller.scrollLeft = until - width / 2;
  $.board.ariaLabel = rows.map((row, d) => `${gpu(d)}: ${row.map(short).join(" ") || "nothing yet"}`).join(". ");
  $.board.onclick = ({ clientX, clientY }) => {
    const { left, top } = $.board.getBoundingClientRect(), device = Math.floor((clientY - top - TOP) / (LANE + GAP));
    const time = (clientX - left - LEFT) / scale, cell = rows[device] && cellsOf(device).find(({ from, until }) => time >= from && time < until);
    choose(cell && !isChosen(device, cell) ? { device, ...cell } : null);
  };
}

function choose(found) {
  chosen = found;
  $.remove.hidden = !found || found.gap;
  draw();
  if (!found) return say(...state());
  const { device, gap, a, from, until } = found, when = `from ${number(from)} to ${number(until)}`;
  say(gap ? `${gpu(device)} is idle ${when}. A button of ${gpu(device)} puts something here.`
    : `${short(a)} on ${gpu(device)}, ${when}. A button of ${gpu(device)} puts something before it; Remove takes it away.`);
}

// ---- the buttons: one for each kind and device, or stage; they stay where they are, and so does the focus

function makeKeys() {
  const kinds = [...new Set(task.kind)].sort((k, l) => "FBIWU".indexOf(k) - "FBIWU".indexOf(l));
  $.keys.style.setProperty("--kinds", (kinds.length * level.stages) / task.devices);
  keys = [];
  $.keys.replaceChildren(...rows.flatMap((_, device) => {
    const mine = [];
    for (let stage = device; stage < level.stages; stage += task.devices) {
      for (const kind of kinds) {
        const [background, color] = level.colours[stage + kind], button = make("button", { type: "button" });
        Object.assign(button.style, { background, color });
        const key = { device, stage, kind, button, action: null };
        button.onclick = () => put(key);
        mine.push(key);
      }
    }
    keys.push(...mine);
    return [make("span", { id: `gpu${device}` }), ...mine.map(({ button }) => button)];
  }));
}

// Each offers the first of its actions that has what it needs, else the first.
function tellKeys() {
  const placed = new Set(rows.flat());
  for (const key of keys) {
    const left = leftOf(task, rows, key.device).filter((a) => task.stage[a] === key.stage && task.kind[a] === key.kind);
    key.action = left.find((a) => fulfilled(task, placed, a)) ?? left[0] ?? null;
    key.button.textContent = key.action === null ? "done" : short(key.action);
    key.button.ariaLabel = key.action === null ? `${gpu(key.device)}: no ${key.kind} is left` : `${short(key.action)} on ${gpu(key.device)}`;
    key.button.setAttribute("aria-disabled", key.action === null);
    key.button.classList.toggle("first", key === keys[0] && !placed.size);
  }
  rows.forEach((_, d) => {
    const cap = task.caps?.[d], label = $.keys.querySelector(`#gpu${d}`);
    label.textContent = `${gpu(d)}\nholds ${held(d)}${cap ? ` of ${cap}` : ""}`;
    label.classList.toggle("full", held(d) === cap);
  });
}

function put({ device, action, kind }) {
  if (action === null) return say(`${gpu(device)} has done every ${kind}.`, "refused");
  const inside = chosen?.device === device ? chosen : null;
  const found = place(task, rows, action, inside?.index ?? null, inside?.gap ? inside.until : null);
  if (!found.rows) return say(refusal(action, found), "refused");
  change(found.rows, action);
}

// ---- changes

function change(after, fresh = null, text = "") {
  past.push({ rows, helped });
  const before = chosen;
  rows = after;
  show(fresh, true, text);
  if (before && fresh !== null && task.device[fresh] === before.device) {
    const index = rows[before.device].indexOf(fresh) + 1, cell = cellsOf(before.device).find((one) => one.index === index && !one.gap);
    if (cell) (chosen = { device: before.device, ...cell }), draw(fresh);
  }
}

function show(fresh = null, moved = false, text = "") {
  chosen = null;
  times = timesOf(task, rows);
  helped &&= rows.flat().length > 0;
  const done = won();
  if (done && remembered(PLAYED)[name] !== "own") keep(PLAYED, { [name]: helped ? "helped" : "own" });
  keep(BOARDS, { [name]: { table: writeRows(task, rows), helped } });
  $.editor.href = `docs/play/editor.html#pipelab=level=${name}&table=${writeRows(task, rows)}`;
  $.keys.hidden = done;
  $.ending.hidden = !done;
  $.undo.setAttribute("aria-disabled", !past.length);
  $.again.setAttribute("aria-disabled", !rows.flat().length);
  $.remove.hidden = true;
  for (const node of [$.step, $.finish]) node.hidden = isWhole(task, rows);
  tellLevels();
  tellKeys();
  draw(fresh, done && moved);
  say(...(text && !done ? [text] : state()));
  if (done && moved) $.ending.focus({ preventScroll: true });
}

function tellLevels() {
  const marks = remembered(PLAYED), next = names.find((other) => other !== name && !marks[other]) ?? FIRST;
  $.next.href = `#${next}`;
  $.next.textContent = `Next: ${levels[next].title}`;
  $.levels.replaceChildren(...names.map((other) => {
    const link = make("a", { href: `#${other}`, textContent: `${STARS[marks[other]] ?? ""}${levels[other].title}` });
    if (other === name) link.ariaCurrent = "page";
    return make("li", {}, link);
  }));
}

// The level in the address, as it was left: a won one does not end again.
function open() {
  const asked = location.hash.slice(1);
  name = asked in levels ? asked : FIRST;
  level = levels[name];
  task = readTask(level);
  const board = remembered(BOARDS)[name];
  rows = readRows(task, board?.table ?? "");
  helped = board?.helped ?? false;
  past = [];
  $.title.textContent = name === FIRST ? `Par ${number(level.par)}` : `${level.title}: par ${number(level.par)}`;
  if (name === FIRST) $.text.innerHTML = firstText;
  else $.text.textContent = plain(level.text);
  document.title = `pipelab: ${level.title}, par ${number(level.par)}`;
  makeKeys();
  show();
  if (asked && asked !== name) say(`There is no level “${asked}”: this is ${level.title}.`, "refused");
}

// ---- what else there is to press

const able = (button, act) => (button.onclick = () => button.getAttribute("aria-disabled") !== "true" && act());

able($.undo, () => {
  ({ rows, helped } = past.pop());
  show();
});
able($.again, () => change(emptyRows(task)));
able($.remove, () => {
  const { a } = chosen, after = settled(task, without(rows, a)), more = rows.flat().length - after.flat().length - 1;
  change(after, null, more ? `${short(a)} is gone, and ${more} more that cannot be without it.` : "");
});

// Squares for each device, busy, half or idle: they keep order and kinds secret.
function squares() {
  const bin = Math.ceil(times.makespan / SQUARES), count = Math.ceil(times.makespan / bin);
  return rows.map((row) => Array.from({ length: count }, (_, k) => {
    const overlap = (a) => Math.max(0, Math.min(times.end.get(a), (k + 1) * bin) - Math.max(times.start.get(a), k * bin));
    const busy = row.reduce((sum, a) => sum + overlap(a), 0) / (Math.min((k + 1) * bin, times.makespan) - k * bin);
    return busy > 0.75 ? "🟩" : busy > 0.25 ? "🟨" : "⬜";
  }).join("")).join("\n");
}

$.share.onclick = async () => {
  const text = `pipelab, ${level.title}: ${number(times.makespan)}, par ${number(level.par)}\n${squares()}`;
  const url = `${location.origin}${location.pathname}#${name}`;
  try {
    if (navigator.share && matchMedia("(pointer: coarse)").matches) return await navigator.share({ text, url });
    await navigator.clipboard.writeText(`${text}\n${url}`);
    $.share.textContent = "Copied";
    setTimeout(() => ($.share.textContent = "Share"), 1500);
  } catch (error) {
    if (error.name !== "AbortError") prompt("To share:", `${text}\n${url}`);
  }
};

// Python, once it is asked for.
let asking = false;
async function ask(what) {
  if (asking) return;
  asking = true;
  say("Python is starting: some seconds the first time. Play on meanwhile.");
  const asked = { name, rows }, table = `#pipelab=level=${name}&table=${writeRows(task, rows)}`;
  let view, failed;
  try {
    const { python } = await import(new URL("_static/play/python.js", document.baseURI).href);
    const opened = await python.ask({ do: "open", widget: "front", kind: "editor", state: { table, help: "legal", helped, won: {} } });
    const reply = opened.failed ? opened : await python.ask({ do: "send", widget: "front", content: { do: what } });
    ({ failed, state: { view } = {} } = reply);
  } catch {
    failed = "Python could not be loaded: a page opened from a folder, or without a network, has none.";
  }
  asking = false;
  if (failed) return say(failed, "refused");
  if (asked.name !== name || (what !== "prove" && asked.rows !== rows)) return; // the player went on
  const { text, mood } = view.said;
  if (what === "prove" || mood === "refused") return say(text, mood === "refused" ? mood : "");
  const after = readRows(task, view.link.split("table=")[1]), fresh = after.flat().filter((a) => !rows.flat().includes(a));
  helped = true;
  change(after, fresh.length === 1 ? fresh[0] : null, text);
}
able($.step, () => ask("step"));
able($.finish, () => ask("finish"));
able($.proof, () => ask("prove"));

// ---- keys

$.board.onkeydown = (event) => {
  const { device, index, gap } = chosen ?? { device: 0, index: -1 }, cells = cellsOf(device);
  const at = cells.findIndex((cell) => cell.index === index && cell.gap === gap);
  const to = { ArrowLeft: [device, at < 0 ? cells.at(-1) : cells[Math.max(at - 1, 0)]], ArrowRight: [device, cells[at + 1]] }[event.key];
  const row = { ArrowUp: device - 1, ArrowDown: device + 1 }[event.key];
  if (to) choose(to[1] ? { device: to[0], ...to[1] } : null);
  else if (rows[row]?.length) choose({ device: row, ...(cellsOf(row).find(({ until }) => until > (chosen?.from ?? 0)) ?? cellsOf(row).at(-1)) });
  else if (["Backspace", "Delete"].includes(event.key) && !$.remove.hidden) $.remove.click();
  else return;
  event.preventDefault();
};
document.onkeydown = (event) => {
  if (event.key === "Escape") choose(null);
  if (event.key !== "z" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  $.undo.click();
};
addEventListener("hashchange", open);
addEventListener("resize", () => draw());
open();
