// The schedule editor in the browser: it draws the rows that Python sends, and asks Python for every move.

const LEFT = 80, RIGHT = 16, TOP = 14, AXIS = 22; // pixels
const LANE = 30, STRIP = 24, GAP = 12, THIN = 15;
const LEAST = 22, MOST = 64; // pixels of the shortest action
const PATIENCE = 3000; // milliseconds that keys wait for the answer to the last move
const OTHERS = 3; // ready actions offered for each other device
const KEYS = "arrow keys move; F, B, I, W or U and a number place an action; Backspace removes it";
const WON = { own: "✓ ", helped: "○ " }; // a level at par: by the player alone, or with the coach
const STATES = { ready: "ready", best: "the coach's move", tie: "as good" };

// ---- the picture

const endOf = (rows) => Math.max(0, ...rows.flatMap(({ cells }) => cells.map(({ until }) => until)));

// The layout of a picture's rows, in groups one below the other: {title, rows, height of a row}.
function place(groups, end, width, unit) {
  const scale = Math.max(LEAST / unit, Math.min(MOST / unit, (width - LEFT - RIGHT) / end)), rows = [];
  let y = TOP;
  const heads = [];
  for (const group of groups) {
    if (group.title) heads.push([group.title, y + 8]);
    y += group.title ? 22 : 0;
    for (const row of group.rows) {
      rows.push({ ...row, y, lane: row.thin ? THIN : LANE });
      y += (row.thin ? THIN : LANE) + (row.held ? STRIP : 0) + (row.close ? 2 : GAP);
    }
  }
  const right = LEFT + end * scale;
  const x = (time) => LEFT + time * scale;
  return { rows, heads, scale, right, width: Math.max(width, right + RIGHT), bottom: y, height: y + AXIS, x };
}

function backdrop({ rows, heads, right, bottom, x }, end, unit) {
  const times = ticks(end, right - LEFT), lines = times.map((time) => `M${round(x(time)) + 0.5} ${TOP - 4}V${bottom}`);
  return `<path class="grid" d="${lines.join("")}"/>
    <g class="times">${times.map((time) => label(x(time), bottom + AXIS / 2, `${number(time)}${unit}`)).join("")}</g>
    <g class="heads">${heads.map(([text, y]) => label(LEFT, y, text)).join("")}</g>`;
}

// The names, and what a device holds, stay in sight while the picture is scrolled.
function names({ rows, bottom }) {
  const name = ({ name, y, lane, star }) => label(LEFT - 8, y + lane / 2, `${star ? "★ " : ""}${name}`);
  const holds = ({ held, cap, left, y, lane }) => {
    const peak = Math.max(...held.map(([, count]) => count)), of = cap === null ? "" : ` of ${cap}`;
    const words = left.length ? `holds ${held[held.length - 1][1]}${of}` : `held ${peak}${of}`; // done: its peak
    return label(LEFT - 8, y + lane + STRIP / 2, words);
  };
  return `<rect class="paper" x="0" y="0" width="${LEFT - 4}" height="${bottom}"/>
    <g class="devices">${rows.map(name).join("")}</g>
    <g class="devices peaks">${rows.filter(({ held }) => held).map(holds).join("")}</g>`;
}

function drawCell({ what, from, until, text, colours, critical, over }, { y, lane, thin }, { x, scale }, hatch) {
  const left = x(from), w = (until - from) * scale;
  if (what === "gap") return `<path fill="url(#${hatch})" d="${box(left, y, w, lane)}"/>`;
  if (what === "end") return "";
  if (w < 1) {
    const above = thin ? "" : label(left, y - 5, text, "font-size:9px");
    return `<path class="instants" d="M${round(left)} ${y}v${lane}"/>${above}`;
  }
  const size = Math.min(13, lane * 0.7, (w - 3) / (0.58 * text.length)), ink = `font-size:${round(size)}px;fill:${colours[1]}`;
  const shown = size >= 6 ? label(left + w / 2, y + lane / 2, text, ink) : "";
  const area = `x="${round(left + 0.75)}" y="${y}" width="${round(Math.max(w - 1.5, 0.5))}" height="${lane}" rx="2"`;
  return `<g class="${what} ${critical ? "critical" : ""} ${over ? "over" : ""}"><rect ${area} fill="${colours[0]}"/>${shown}</g>`;
}

// What a device holds over time, below its lane, and the cap over it.
function drawHeld({ held, cap, y, lane, cells }, { x, right }, most) {
  if (!held) return "";
  const base = y + lane + STRIP, high = (STRIP - 5) / Math.max(most, 1);
  const until = x(Math.max(0, ...cells.map((cell) => cell.until)));
  let path = `M${LEFT} ${base}`;
  held.forEach(([time, count], k) => {
    path += `H${round(x(time))}V${round(base - count * high)}`;
    if (k === held.length - 1) path += `H${round(until)}`;
  });
  const peak = Math.max(...held.map(([, count]) => count)), line = round(base - cap * high) + 0.5;
  const limit = cap === null ? "" : `<path class="cap" d="M${LEFT} ${line}H${round(right)}"/>`;
  return `<path class="held ${peak === cap ? "full" : ""}" d="${path}V${base}z"/>
    <path class="base" d="M${LEFT} ${base}H${round(right)}"/>${limit}`;
}

function newPicture(hatch, layers) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.innerHTML = hatching(hatch) + layers.map((name) => `<g class="${name}"></g>`).join("");
  return [svg, Object.fromEntries(layers.map((name) => [name, svg.querySelector(`.${name}`)]))];
}

function drawRows(svg, layer, groups, end, unit, axis, width, hatch) {
  const area = place(groups, end, width, unit);
  const counts = ({ held, cap }) => [cap ?? 0, ...(held ?? []).map(([, count]) => count)];
  const most = Math.max(1, ...area.rows.flatMap(counts));
  svg.setAttribute("width", round(area.width));
  svg.setAttribute("height", area.height);
  layer.frame.innerHTML = backdrop(area, end, axis);
  layer.names.innerHTML = names(area);
  const cells = (row) => row.cells.map((cell) => drawCell(cell, row, area, hatch)).join("");
  layer.lanes.innerHTML = area.rows.map((row) => cells(row) + drawHeld(row, area, most)).join("");
  return area;
}

// ---- the widget

function render({ model, el }) {
  const button = (textContent, onclick, more = {}) => html("button", { type: "button", textContent, onclick, ...more });
  const ask = (what, words = {}) => ((asked = performance.now()), model.send({ do: what, ...words }));
  const waiting = () => performance.now() - asked < PATIENCE;
  const choose = (text, name, onchange) => {
    const list = html("select", { name, onchange: () => onchange(list.value) });
    return [list, html("label", {}, html("span", {}, text), list)];
  };
  const hatch = `pipelab-editor-${++patterns}`;
  let view, area, typed = "", cursor = { device: 0, index: null, gap: false };
  let after = null; // where the cursor goes if the move is made
  let asked = -PATIENCE, keys = []; // when Python was asked last; what was typed since

  // -- the elements of the page
  const [levels, levelBox] = choose("level", "level", (name) => (name ? ask("open_level", { name }) : openSandbox()));
  const [help, helpBox] = choose("help", "help", (value) => ask("set_help", { help: value }));
  const text = html("p", { className: "text" });
  const next = button("Next level", () => (ask("open_level", { name: next.value }), svg.focus()), { className: "next" });
  const [form, sizes] = sandboxForm();
  const said = html("p", { className: "said", role: "status", ariaLive: "polite" });
  const [svg, layer] = newPicture(hatch, ["frame", "lanes", "cursor", "names"]);
  Object.assign(svg, { tabIndex: 0, role: "application", ariaRoleDescription: `table to edit. ${KEYS}` });
  const scroller = html("div", { className: "scroller", onscroll: follow }, svg);
  const about = html("p", { className: "about-cell", ariaLive: "polite" });
  const tray = html("div", { className: "tray", role: "group" });
  const mark = (name, text) => {
    const input = html("input", { type: "checkbox", name, onchange: () => ask("show", { [name]: input.checked }) });
    return [input, html("label", { className: "mark" }, input, html("span", {}, text))];
  };
  const [critical, criticalBox] = mark("critical", "critical path"), [par, parBox] = mark("par", "show par below");
  const undo = button("Undo", () => ask("undo")), redo = button("Redo", () => ask("redo"));
  const step = button("Step", () => ask("step"), { title: "place what the coach would place" });
  const finish = button("Finish it for me", () => ask("finish"));
  const proof = button("Show me the proof", () => ask("prove"), { title: "why nobody ends before par" });
  const stamp = button("Stamp", () => ask("stamp", { microbatch: microbatchOf(cellAt()) }), { className: "stamp" });
  const clear = button("Clear", () => ask("clear"));
  const slow = "on worker threads, every action as long as planned", fast = "on worker threads, as fast as they go";
  const paced = button("Run it", () => runIt(true), { className: "run", title: slow });
  const native = button("Run at full speed", () => runIt(false), { title: fast });
  const link = html("input", { type: "text", name: "link", readOnly: true, ariaLabel: "link", onfocus: () => link.select() });
  const file = html("input", { type: "file", accept: ".csv,.txt", ariaLabel: "open a file", onchange: openFile });
  const open = html("label", { className: "mark" }, html("span", {}, "open"), file);
  const copy = button("Copy link", copyLink), save = button("Save file", saveFile);
  const ways = html("div", { className: "bar" }, link, copy, save, open);
  const keep = html("details", {}, html("summary", {}, "Link or file"), ways);
  const legend = html("span", { className: "legend" }), table = html("table", { className: "measures" });
  const [trialSvg, trialLayer] = newPicture(`${hatch}-run`, ["frame", "lanes", "names"]);
  const trialText = html("p", { className: "verdict", role: "status", ariaLive: "polite" });
  const trialScroller = html("div", { className: "scroller", onscroll: follow }, trialSvg);
  const trial = html("div", { className: "trial" }, trialText, trialScroller);
  trialSvg.setAttribute("role", "img");
  const saved = html("p", { className: "saved" }, "A saved picture: run this cell to play; the arrow keys work.");
  const moves = html("div", { className: "bar moves" }, undo, redo, step, finish, stamp, clear);
  const runs = html("div", { className: "bar runs" }, paced, native, criticalBox, parBox, proof);
  const controls = html("div", { className: "controls" }, html("div", { className: "bar" }, levelBox, helpBox, next), form);
  const picture = html("div", { className: "picture" }, scroller, html("div", { className: "about-room" }, about), html("div", { className: "bar" }, legend));
  const left = html("div", { className: "picture-and-moves" }, picture, tray, moves, runs, keep);
  const body = html("div", { className: "body" }, left, html("div", { className: "side" }, table));
  el.append(html("div", { className: "pipelab-explorer pipelab-editor" }, saved, controls, text, said, body, trial));
  keysStayHere(el);

  // Keys typed here are not the notebook's commands.
  function keysStayHere(root) {
    const nodes = root.querySelectorAll("input, select, summary, button, svg");
    for (const node of nodes) node.setAttribute("data-lm-suppress-shortcuts", "");
  }

  function sandboxForm() {
    const fields = {};
    const field = (name, text, properties) => {
      fields[name] = html("input", { name, ...properties });
      return html("label", { className: properties.type === "checkbox" ? "mark" : "" }, html("span", {}, text), fields[name]);
    };
    const number = { type: "number", min: 1, max: 64 };
    const form = html("form", { className: "bar sandbox" },
      field("devices", "devices p", number), field("microbatches", "micro-batches m", number),
      field("virtual", "chunks a device v", number), field("cap", "cap (none, one, or one a device)", { type: "text" }),
      field("split", "backwards in two", { type: "checkbox" }), html("button", { type: "submit", textContent: "Start" }));
    form.onsubmit = (event) => (event.preventDefault(), openSandbox()); // in JupyterLab, Enter submits nothing
    form.onkeydown = (event) => {
      if (event.key === "Enter" && event.target.type !== "submit") form.onsubmit(event);
    };
    return [form, fields];
  }

  function openSandbox() {
    const caps = sizes.cap.value.split(/[\s,]+/).filter(Boolean).map(Number);
    const of = (name) => sizes[name].valueAsNumber || 0;
    ask("open_task", { devices: of("devices"), microbatches: of("microbatches"), virtual: of("virtual"),
      cap: caps.length > 1 ? caps : caps[0] ?? null, split: sizes.split.checked });
  }

  // -- the cursor: on the action with this index of a row, or the gap before it; null is the end of the row

  const rowAt = () => view.rows[cursor.device];
  const cellsAt = (index) => rowAt().cells.filter((cell) => cell.index === index);

  function cellAt() {
    const here = cellsAt(cursor.index);
    return here.find(({ what }) => (what === "gap") === cursor.gap) ?? here.at(-1) ?? rowAt().cells.at(-1);
  }

  const microbatchOf = ({ action }) => (action ? +action.split(/[A-Z]+/)[1] : 0);
  const point = (device, { what, index }) => moveTo({ device, index: what === "end" ? null : index, gap: what === "gap" });

  function moveTo(to) {
    cursor = to;
    typed = "";
    drawCursor();
    drawTray();
  }

  // near: the note on its action is shown beside it, too
  function drawCursor(near = false) {
    if (!area) return;
    const cell = cellAt(), row = area.rows[cursor.device], unit = view.level.unit;
    const left = area.x(cell.from), w = (cell.what === "end" ? unit : cell.until - cell.from) * area.scale;
    const words = typed ? `${typed}_` : cell.what === "end" && rowAt().left.length ? "?" : "";
    const size = `width="${round(Math.max(w, 3) + 1)}" height="${row.lane + 4}"`;
    const frame = `x="${round(left - 0.5)}" y="${row.y - 2}" ${size} rx="3"`;
    layer.cursor.innerHTML = `<rect class="${cell.what} ${typed ? "typed" : ""}" ${frame}/>
      ${label(left + w / 2, row.y + row.lane / 2, words, "text-anchor:middle;font-size:13px")}`;
    about.textContent = cell.about;
    about.classList.toggle("near", near && cell.what !== "end");
    const from = scroller.scrollLeft, shown = scroller.clientWidth;
    if (left < from + LEFT) scroller.scrollLeft = left - LEFT - 20;
    else if (left + w > from + shown - 20) scroller.scrollLeft = left + w - shown + RIGHT;
    if (near) standBeside(about, picture, layer.cursor.firstChild.getBoundingClientRect());
  }

  function drawTray() {
    const row = rowAt(), kinds = new Map();
    for (const chip of row.left) {
      const kind = chip.action.replace(/\d/g, "");
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push(chip);
    }
    const told = view.help === "ready" || view.help === "coach";
    const chip = ({ text, action, colours, state }, name = text) => button(name, () => send(action, false), {
      className: `chip ${state} ${told && !state ? "dim" : ""}`,
      title: STATES[state] ?? "",
      ariaLabel: `${action}${state ? `, ${STATES[state]}` : ""}`,
      style: `background:${colours[0]};color:${colours[1]}`,
    });
    const groups = [...kinds.values()].map((chips) => html("span", {}, ...chips.map((one) => chip(one))));
    const marked = ({ device, left }) => (device === row.device ? [] : left.filter(({ state }) => state).slice(0, OTHERS));
    const elsewhere = view.rows.flatMap(marked);
    const theirs = elsewhere.map((one) => chip(one, one.action));
    const others = theirs.length ? [html("i", {}, "on other devices"), html("span", {}, ...theirs)] : [];
    tray.ariaLabel = `${row.name}: what is left to place`;
    const name = view.level.chunks ? `${row.name}, ${row.stages}:` : `${row.name}:`;
    tray.replaceChildren(html("b", {}, name), ...(groups.length ? groups : ["all is placed"]), ...others);
    keysStayHere(tray);
    stamp.textContent = `Stamp micro-batch ${microbatchOf(cellAt())} over all`;
  }

  function walk(along) {
    const cells = rowAt().cells, to = cells[Math.min(Math.max(cells.indexOf(cellAt()) + along, 0), cells.length - 1)];
    point(cursor.device, to);
  }

  function change(down) {
    const cell = cellAt(), last = cell.what === "end", device = Math.min(Math.max(cursor.device + down, 0), view.rows.length - 1);
    const cells = view.rows[device].cells, middle = (cell.from + cell.until) / 2;
    point(device, last ? cells.at(-1) : cells.find(({ until }) => until > middle) ?? cells.at(-1));
  }

  // -- moves

  // Place an action at the cursor; another device's action goes to the end of its row.
  function send(action, focus = true) {
    const cell = cellAt(), inside = cursor.index !== null && rowAt().left.some((chip) => chip.action === action);
    if (!inside) ask("place", { action });
    else ask("place", { action, index: cursor.index, until: cell.what === "gap" ? cell.until : null });
    after = inside ? { ...cursor, index: cursor.index + 1, gap: false } : null;
    if (focus) svg.focus();
  }

  // F3 belongs to the device at the cursor: to its first stage that has one left.
  function commit() {
    const [, stage, kind, number] = typed.match(/^(\d*)([A-Z])(\d*)$/) ?? [];
    if (!kind) return;
    const fits = (chip) => new RegExp(`^${stage || "\\d+"}${kind}${number || "\\d+"}$`).test(chip.action);
    const found = rowAt().left.find(fits);
    typed = "";
    drawCursor();
    send(found ? found.action : `${stage || cursor.device}${kind}${number || 0}`);
  }

  function type(key) {
    const letter = "FBIWU".includes(key.toUpperCase());
    if (letter && /[A-Z]/.test(typed)) typed = "";
    typed += key.toUpperCase();
    const [, number] = typed.match(/[A-Z](\d+)$/) ?? [];
    const { microbatches, batches } = view.level.sizes;
    if (number !== undefined && (+number === 0 || +number * 10 > microbatches * batches - 1)) commit();
    else drawCursor();
  }

  function remove(before) {
    if (typed) {
      typed = typed.slice(0, -1);
      return drawCursor();
    }
    const cells = rowAt().cells, here = cells.indexOf(cellAt());
    const cell = cells[here].action || !before ? cells[here] : cells.slice(0, here).findLast(({ action }) => action);
    if (cell?.action) {
      ask("remove", { action: cell.action });
    }
  }

  const reactions = {
    ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), ArrowUp: () => change(-1), ArrowDown: () => change(1),
    Home: () => walk(-1e9), End: () => walk(1e9), Backspace: () => remove(true), Delete: () => remove(false),
    Enter: commit, Escape: () => ((typed = ""), drawCursor()),
  };

  function reactionTo({ key, ctrlKey, metaKey, altKey }) {
    if (ctrlKey || metaKey) return { z: () => ask("undo"), y: () => ask("redo") }[key];
    return !altKey && /^[fbiwuFBIWU\d]$/.test(key) ? () => type(key) : reactions[key];
  }

  svg.onkeydown = (event) => {
    const reaction = reactionTo(event);
    if (!reaction) return;
    event.preventDefault();
    keys.push(reaction);
    react();
  };

  // One key after another, each once the move before it is answered.
  function react() {
    while (keys.length && !waiting()) keys.shift()();
  }

  svg.onclick = (event) => {
    const { left, top } = svg.getBoundingClientRect(), y = event.clientY - top, time = (event.clientX - left - LEFT) / area.scale;
    const device = area.rows.slice(0, view.rows.length).findIndex((row) => y >= row.y - 6 && y < row.y + row.lane + STRIP);
    if (device < 0) return;
    svg.focus();
    const cells = view.rows[device].cells;
    point(device, cells.find((cell) => time < cell.until) ?? cells.at(-1));
    drawCursor(true);
  };

  function runIt(paced) {
    said.textContent = "Running …";
    said.className = "said";
    ask("run", { paced });
  }

  // -- link and file

  async function copyLink() {
    link.focus();
    try {
      await navigator.clipboard.writeText(link.value);
    } catch {
      document.execCommand("copy"); // where the page may not write to the clipboard
    }
  }

  function saveFile() {
    const address = URL.createObjectURL(new Blob([view.file], { type: "text/csv" }));
    html("a", { href: address, download: `${view.level.name || "table"}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address));
  }

  async function openFile() {
    if (file.files.length) ask("load", { text: await file.files[0].text() });
    file.value = "";
  }

  // -- what Python says

  function draw() {
    const width = scroller.clientWidth, { unit } = view.level;
    if (width < 100) return; // not laid out yet
    const mine = view.rows.map((row) => ({ ...row, star: row.left.some(({ state }) => state === "best") }));
    const groups = [{ rows: mine }, ...(view.par.rows ? [{ title: view.par.title, rows: view.par.rows }] : [])];
    const until = Math.max(endOf(mine), view.level.par) + unit; // room for par from the beginning
    area = drawRows(svg, layer, groups, until, unit, "", width, hatch);
    drawCursor();
    if (!view.trial.planned) return;
    const pairs = view.trial.planned.flatMap((row, d) => [
      { ...row, close: true }, { ...view.trial.measured[d], name: "measured", thin: true }]);
    const end = endOf(pairs), room = end / Math.max(...pairs.map(({ cells }) => 2 * cells.length));
    drawRows(trialSvg, trialLayer, [{ rows: pairs }], end, room, " ms", width, `${hatch}-run`);
  }

  function take() {
    view = model.get("view");
    if (after && view.said.mood !== "refused") cursor = after;
    after = null;
    asked = -PATIENCE;
    cursor.device = Math.min(cursor.device, view.rows.length - 1);
    const { level } = view, option = ([value, text]) => html("option", { value, textContent: text });
    const titled = view.levels.map(([name, title, won]) => option([name, `${WON[won] ?? ""}${title}`]));
    levels.replaceChildren(...titled, option(["", "Design your own"]));
    levels.value = level.name;
    help.replaceChildren(...view.rungs.map(option));
    help.value = view.help;
    text.textContent = level.name ? `${level.text} Par is ${number(level.par)}.` : level.text;
    const names = view.levels.map(([name]) => name);
    next.value = names[names.indexOf(level.name) + 1] ?? "";
    const won = view.levels.some(([name, , mark]) => name === level.name && mark);
    next.hidden = !won || !next.value;
    form.hidden = Boolean(level.name);
    for (const [name, value] of Object.entries({ ...level.sizes, cap: level.cap })) if (sizes[name]) sizes[name].value = value;
    sizes.split.checked = level.split;
    said.textContent = view.said.text;
    said.className = `said ${view.said.mood}`;
    const entry = (text, properties) => html("span", {}, html("i", properties), text);
    const kinds = view.legend.map(([text, colour]) => entry(text, { style: `background:${colour}` }));
    const others = [entry("idle", { className: "hatched" }), entry("held for a backward", { className: "holds" })];
    legend.replaceChildren(...kinds, ...others);
    table.replaceChildren(...view.numbers.map(([name, hint, value, beside]) => html("tr", { title: hint },
      html("th", { scope: "row", textContent: name, title: hint }), html("td", {}, value || "–"), html("td", {}, beside))));
    const best = view.rows.flatMap(({ left }) => left).find(({ state }) => state === "best");
    step.textContent = best ? `Step: ${best.action}` : "Step";
    undo.disabled = !view.undo;
    redo.disabled = !view.redo;
    for (const node of [paced, native, critical]) node.disabled = !view.whole;
    critical.checked = view.marks.critical;
    par.checked = view.marks.par;
    link.value = location.origin + location.pathname + view.link; // a token in the address is not handed on
    svg.ariaLabel = view.summary;
    trial.hidden = !view.trial.text;
    trialText.textContent = view.trial.text ?? "";
    trialSvg.ariaLabel = view.trial.text ?? "";
    draw();
    drawTray();
    react();
  }

  model.on("change:view", take);
  take();
  const watch = new ResizeObserver(draw);
  watch.observe(scroller);
  if (location.hash.startsWith("#pipelab=")) { // the first editor on the page takes the table in its address
    ask("load", { text: location.hash });
    history.replaceState(null, "", location.pathname + location.search);
  }
  return () => {
    watch.disconnect();
    model.off("change:view", take);
  };
}

export default { render };
