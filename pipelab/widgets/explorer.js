// The schedule explorer in the browser: Python computes; this file draws the result and sends what the form says.

const SIZES = { // setting: what the form calls it, and where its slider ends
  devices: ["devices p", 32], microbatches: ["micro-batches m", 128], virtual: ["chunks a device v", 8],
  batches: ["batches", 8],
};
const SECONDS = ["forward", "input_grad", "weight_grad", "update", "transfer"];
const BYTES = ["weights", "optimizer", "activations", "boundary", "host"];
const SWEEP = 8000, STEP = 600; // milliseconds of a whole play, and between its steps if the reader prefers reduced motion
const BOTH = -2; // as in drawing.py

// ---- small tools

// The last index in the rising values[from:to] whose value is at most x, or from - 1.
function lastUpTo(values, x, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= x) from = middle + 1;
    else to = middle;
  }
  return from - 1;
}

// ---- the form

function makeForm(choices, changed) {
  const controls = {};
  const list = (name, text, values) => {
    const options = values.map((value) => html("option", { value, textContent: value || "none" }));
    controls[name] = html("select", { name, onchange: changed }, ...options);
    return html("label", {}, html("span", {}, text), controls[name]);
  };
  const size = ([name, [text, max]]) => {
    const slider = html("input", { type: "range", min: 1, max });
    const exact = html("input", { type: "number", name, min: 1, ariaLabel: `${text}, number` });
    slider.oninput = () => ((exact.value = slider.value), changed());
    exact.onchange = changed;
    exact.onkeydown = (event) => {
      if (event.key === "Enter") event.preventDefault(), changed();
    };
    Object.assign(controls, { [name]: exact, [`${name} slider`]: slider });
    return html("label", {}, html("span", {}, text), slider, exact);
  };
  const amount = (name, text = name.replace("grad", "gradient").replace("_", " "), more = {}) => {
    const field = html("input", { type: "text", name, inputMode: "decimal", autocomplete: "off", onchange: changed, ...more });
    field.onkeydown = (event) => {
      if (event.key === "Enter") event.preventDefault(), changed(); // in JupyterLab, Enter alone changes nothing
      const step = { ArrowUp: 0.25, ArrowDown: -0.25 }[event.key];
      if (!step || field.value.trim() === "" || isNaN(field.value)) return;
      event.preventDefault();
      field.value = number(Math.max(0, +field.value + step));
      changed();
    };
    controls[name] = field;
    return html("label", {}, html("span", {}, text), field);
  };
  const group = (text, ...fields) => html("fieldset", {}, html("legend", {}, text), ...fields);
  const costs = html("details", { open: innerWidth >= NARROW },
    html("summary", {}, "Costs of a device's share of the model: one number, or one per device with commas"),
    group("seconds", ...SECONDS.map((name) => amount(name))),
    group("bytes", ...BYTES.map((name) => amount(name)), list("recompute", "recompute", choices.recompute)));
  const sizes = html("div", { className: "sizes" },
    list("schedule", "schedule", choices.schedules), list("compare", "compare with", ["", ...choices.schedules]),
    ...Object.entries(SIZES).map(size), amount("memory", "memory, in micro-batches", { placeholder: "as many as p" }));
  return [html("form", { onsubmit: (event) => event.preventDefault() }, sizes, costs), controls];
}

function readForm(controls, names) {
  const value = ({ type, value, valueAsNumber }) => (type !== "number" ? value : isNaN(valueAsNumber) ? null : valueAsNumber);
  return Object.fromEntries(names.map((name) => [name, value(controls[name])]));
}

const anyOf = (names, { schedule, compare }) => names.includes(schedule) || names.includes(compare);

function writeForm(controls, settings, choices) {
  for (const [name, value] of Object.entries(settings)) {
    const slider = controls[`${name} slider`];
    if (slider && value !== null) {
      slider.max = Math.max(slider.max, value);
      slider.value = value;
    }
    if (controls[name].value !== String(value ?? "")) controls[name].value = value ?? "";
  }
  for (const name of ["virtual", "virtual slider"]) controls[name].disabled = !anyOf(choices.chunks, settings);
  controls.memory.disabled = !anyOf(choices.limited, settings);
}

// ---- an action in words

const deviceOf = (t, i) => lastUpTo(t.bounds, i, 0, t.bounds.length);
const before = (t, i) => (t.bounds.includes(i) ? -1 : i - 1);
const needed = (t, i) => [t.source[i], before(t, i)].filter((j) => j >= 0);
const needing = (t, i) => [t.taker[i], t.bounds.includes(i + 1) ? -1 : i + 1].filter((j) => j >= 0);
const nameOf = ({ letters }, t, i) => `${t.stage[i]}${letters[t.kind[i]]}${t.microbatch[i]}`;

function causeOf(drawing, t, i) {
  if (t.cause[i] !== BOTH) return nameOf(drawing, t, t.cause[i]);
  return `${nameOf(drawing, t, t.source[i])} and ${nameOf(drawing, t, before(t, i))}, both done at once`;
}

function describe(drawing, t, i) {
  const name = (j) => nameOf(drawing, t, j), row = before(t, i), source = t.source[i];
  const update = drawing.letters[t.kind[i]] === "U", idle = t.start[i] - (row < 0 ? 0 : t.end[row]);
  const what = update ? `update ${t.microbatch[i]}` : `${drawing.names[t.kind[i]]} of micro-batch ${t.microbatch[i]}`;
  const span = `from ${number(t.start[i])} to ${number(t.end[i])}`;
  const version = `${update ? "makes" : "reads"} weight version ${t.version[i]}`;
  const needs = [];
  if (source >= 0) needs.push(`its input from ${name(source)}, here at ${number(t.there[i])}`);
  if (row >= 0) needs.push(`${name(row)} before it in its row, done at ${number(t.end[row])}`);
  let waits = needs.length ? `${needs.join("; ")}.` : "nothing: it starts at once.";
  if (needs.length > 1) waits += ` The last: ${causeOf(drawing, t, i)}.`;
  if (idle > 1e-6 * drawing.end) waits += ` The device was idle for ${number(idle)}.`;
  const waiting = (j) => t.cause[j] === i || t.cause[j] === BOTH;
  const kept = needing(t, i).filter(waiting).map(name).join(" and ") || "none";
  const others = needing(t, i).filter((j) => !waiting(j))
    .map((j) => `; ${name(j)} needs it too, but waits for ${causeOf(drawing, t, j)}`);
  return [
    [name(i), `${what}, stage ${t.stage[i]}, device ${deviceOf(t, i)}: ${span}, ${version}.`],
    ["waits for", waits], ["keeps waiting", `${kept}${others.join("")}.`],
  ];
}

function describeIdle(drawing, t, device, next) {
  const last = next >= t.bounds[device + 1], begin = next > t.bounds[device] ? t.end[next - 1] : 0;
  const why = last ? "nothing left to do" : `${nameOf(drawing, t, next)} waits for ${causeOf(drawing, t, next)}`;
  return [["idle", `device ${device}, from ${number(begin)} to ${number(last ? t.makespan : t.start[next])}: ${why}.`]];
}

// ---- the widget

function render({ model, el }) {
  const choices = model.get("choices"), hatch = `pipelab-idle-${++patterns}`;
  const [form, controls] = makeForm(choices, send);
  const error = html("p", { className: "error", role: "alert" });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.innerHTML = `${hatching(hatch)}<g class="frame"></g><g class="lanes"></g><g class="selection"></g><g class="running"></g><line class="cursor"/><g class="names"></g>`;
  const speech = { role: "application", ariaRoleDescription: "timeline: arrow keys move between actions, space plays" };
  Object.assign(svg, { tabIndex: 0, ...speech });
  const layer = Object.fromEntries([...svg.children].map((node) => [node.getAttribute("class"), node]));
  const play = html("button", { type: "button", className: "play", onclick: toggle });
  const clock = html("output", { className: "clock" }), legend = html("span", { className: "legend" });
  const hint = html("p", { className: "hint" }, "Point at an action or tap it, or go to the timeline with Tab and use the arrow keys.");
  const about = html("dl", { className: "about", ariaLive: "polite" }), table = html("table", { className: "measures" });
  const bar = html("div", { className: "bar" }, play, clock, legend);
  const scroller = html("div", { className: "scroller", onscroll: (event) => (follow(event), select(chosen)) }, svg);
  const picture = html("div", { className: "picture" }, scroller, bar, hint, about);
  const saved = html("p", { className: "saved" }, "A saved picture: run this cell to change it; pointing and Play work.");
  const body = html("div", { className: "body" }, picture, table);
  el.append(html("div", { className: "pipelab-explorer" }, form, saved, error, body));
  for (const node of el.querySelectorAll("input, select, summary, button, svg")) {
    node.setAttribute("data-lm-suppress-shortcuts", ""); // keys typed here are not the notebook's commands
  }

  let drawing, place, room; // what to draw, and where, in how many pixels
  let chosen = null; // {timeline, i}: an action; or {timeline, i, idle}: the idle time of device `idle` before action i
  let time = null, request = 0; // of the play; the request for its next frame, 0 while it pauses

  function send() {
    const settings = readForm(controls, Object.keys(model.get("settings")));
    // A schedule with chunks starts with two: with one chunk it is another schedule.
    if (anyOf(choices.chunks, settings) && controls.virtual.disabled && settings.virtual === 1) settings.virtual = 2;
    writeForm(controls, settings, choices);
    model.set("settings", settings);
    model.save_changes();
  }

  function take() {
    drawing = model.get("drawing");
    chosen = null;
    draw();
    legend.replaceChildren(...legendOf(drawing));
    if (drawing.memory) legend.append(html("b", { textContent: "memory" }), ...drawing.causes.map(entry));
    const rows = drawing.numbers.map(([name, hint, ...values]) => html("tr", { title: hint, className: hint ? "" : "part" },
      html("th", { scope: "row", textContent: name, title: hint }), ...values.map((value) => html("td", {}, value))));
    const names = drawing.timelines.map((t) => html("th", { scope: "col", textContent: t.name }));
    table.replaceChildren(...(names.length > 1 ? [html("tr", {}, html("td"), ...names)] : []), ...rows);
    svg.ariaLabel = drawing.timelines.map((t) => t.summary).join(" Compared with: ");
  }

  function draw() {
    room = picture.clientWidth;
    if (!drawing || room < 200) return; // not laid out yet
    const width = widthOf(drawing, room);
    place = layout(drawing, width);
    svg.setAttribute("width", width);
    svg.setAttribute("height", place.height);
    layer.frame.innerHTML = frame(place, drawing);
    layer.names.innerHTML = names(place);
    layer.lanes.innerHTML = boxes(place, drawing, hatch) + strips(place, drawing);
    select(chosen);
    light();
  }

  // -- pointing at an action, with a mouse or with keys

  const rowOf = (t, device) => place.rows.find((row) => row.t === t && row.device === device);

  function outline(t, i, kind) {
    const { y } = rowOf(t, deviceOf(t, i)), w = Math.max((t.end[i] - t.start[i]) * place.scale, 2);
    const [from, part] = share(t, i), top = round(y + from * place.lane), tall = round(part * place.lane);
    return `<rect class="${kind}" x="${round(place.x(t.start[i]))}" y="${top}" width="${round(w)}" height="${tall}"/>`;
  }

  function line(t, i, j, kind) {
    const point = (time, k) => `${round(place.x(time))} ${rowOf(t, deviceOf(t, k)).y + place.lane / 2}`;
    return i < 0 || j < 0 ? "" : `<path class="${kind}" d="M${point(t.end[i], i)}L${point(t.start[j], j)}"/>`;
  }

  function select(found) {
    chosen = found;
    const { timeline, i, idle } = found ?? {}, t = place.items[timeline];
    layer.selection.innerHTML = !found || idle !== undefined ? "" : [
      ...needed(t, i).map((j) => outline(t, j, "needed")), ...needing(t, i).map((j) => outline(t, j, "needing")),
      line(t, t.source[i], i, "needed"), line(t, i, t.taker[i], "needing"), outline(t, i, "chosen"),
    ].join("");
    const lines = !found ? [] : idle === undefined ? describe(drawing, t, i) : describeIdle(drawing, t, idle, i);
    about.replaceChildren(...lines.flatMap(([term, text]) => [html("dt", {}, term), html("dd", {}, text)]));
    if (found) standBeside(about, picture, boxOf(t, i, idle));
  }

  // Where an action, or the idle time before it, is in the window.
  function boxOf(t, i, idle) {
    const { left, top } = svg.getBoundingClientRect(), { y } = rowOf(t, idle ?? deviceOf(t, i)), { lane, x } = place;
    const rest = idle !== undefined, last = rest && i >= t.bounds[idle + 1], before = i > t.bounds[idle] ? t.end[i - 1] : 0;
    const [from, until] = !rest ? [t.start[i], t.end[i]] : [before, last ? t.makespan : t.start[i]];
    return { left: left + x(from), right: left + x(until), top: top + y, bottom: top + y + lane };
  }

  function at(event) {
    const area = svg.getBoundingClientRect(), y = event.clientY - area.top;
    const when = (event.clientX - area.left - LEFT) / place.scale;
    const row = place.rows.find((row) => y >= row.y && y < row.y + place.lane + place.strip);
    if (!row || when < 0 || when > row.t.makespan) return null;
    const { t, device } = row, timeline = place.items.indexOf(t);
    const last = lastUpTo(t.start, when, t.bounds[device], t.bounds[device + 1]);
    const i = t.joined.includes(last) && y < row.y + place.lane / 2 ? last - 1 : last;
    const until = t.end[i] + (t.end[i] > t.start[i] ? 0 : 2 / place.scale); // an instant is hit within two pixels
    return i < t.bounds[device] || when > until ? { timeline, i: i + 1, idle: device } : { timeline, i };
  }

  function step(down, along) {
    if (!chosen) return select({ timeline: 0, i: 0 });
    const { timeline, i, idle } = chosen, t = place.items[timeline], row = place.rows.indexOf(rowOf(t, idle ?? deviceOf(t, i)));
    const target = place.rows[Math.min(Math.max(row + down, 0), place.rows.length - 1)];
    const [from, to] = [target.t.bounds[target.device], target.t.bounds[target.device + 1]];
    const when = idle === undefined ? (t.start[i] + t.end[i]) / 2 : t.end[Math.max(i - 1, 0)];
    const next = along ? i + along - (idle !== undefined && along > 0) : lastUpTo(target.t.start, when, from, to);
    const found = { timeline: place.items.indexOf(target.t), i: Math.min(Math.max(next, from), to - 1) };
    show(place.x(target.t.start[found.i]));
    select(found);
  }

  // Scroll until this place of the picture is in sight.
  function show(x) {
    const { scrollLeft, clientWidth } = scroller;
    if (x < scrollLeft + LEFT || x > scrollLeft + clientWidth - 40) scroller.scrollLeft = x - clientWidth / 2;
  }

  // A mouse points, a finger taps; a tap elsewhere clears the selection.
  const mouse = ({ pointerType }) => place && pointerType !== "touch";
  svg.onpointermove = (event) => mouse(event) && select(at(event));
  svg.onpointerleave = (event) => mouse(event) && select(null);
  svg.onclick = (event) => place && select(at(event));
  const elsewhere = ({ target }) => chosen && !svg.contains(target) && select(null);
  document.addEventListener("pointerdown", elsewhere);
  svg.onkeydown = (event) => {
    const steps = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9],
    };
    if (!place) return;
    if (event.key === " ") toggle();
    else if (event.key === "Escape") select(null);
    else if (event.key in steps) step(...steps[event.key]);
    else return;
    event.preventDefault();
  };

  // -- playing: a cursor sweeps over time and lights up what every device does then

  function toggle() {
    if (request || !place) return pause();
    if (time === null) time = 0;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches; // then it jumps from one action's start to the next
    let last = performance.now();
    const advance = (now) => {
      if (!still || now - last >= STEP) {
        time = still ? nextStart() : time + (Math.max(now - last, 0) / SWEEP) * drawing.end;
        last = now;
        light();
      }
      if (time < drawing.end) request = requestAnimationFrame(advance);
      else (time = null), pause();
    };
    request = requestAnimationFrame(advance);
    light();
  }

  function pause() {
    cancelAnimationFrame(request);
    request = 0;
    light();
  }

  function nextStart() {
    const least = time + drawing.end / 60; // skips some of many short actions
    return place.items.reduce((first, t) => t.start.reduce((a, s) => (s >= least && s < a ? s : a), first), drawing.end);
  }

  function light() {
    play.textContent = request ? "Pause" : "Play";
    clock.textContent = time === null ? "" : `t = ${number(time)}`;
    svg.classList.toggle("playing", time !== null);
    if (time === null || !place) return layer.running.replaceChildren();
    const { rows, lane, scale, bottom, x } = place, at = round(x(Math.min(time, drawing.end)));
    show(at);
    for (const [key, value] of Object.entries({ x1: at, x2: at, y1: 2, y2: bottom })) layer.cursor.setAttribute(key, value);
    layer.running.innerHTML = rows.map(({ t, device, y }) => {
      const i = lastUpTo(t.start, time, t.bounds[device], t.bounds[device + 1]);
      if (i < t.bounds[device] || time >= t.end[i]) return "";
      const w = (t.end[i] - t.start[i]) * scale, left = x(t.start[i]), [fill, ink] = t.colours[t.colour[i]];
      const size = Math.min(11, lane * 0.7), style = `font-size:${size}px;fill:${ink}`;
      const shown = w > 0.7 * size * t.digits ? label(left + w / 2, y + lane / 2, t.microbatch[i], style) : "";
      return `<rect x="${round(left)}" y="${y}" width="${round(w)}" height="${lane}" fill="${fill}"/>${shown}`;
    }).join("");
  }

  // -- what Python says

  const said = {
    "change:settings": () => writeForm(controls, model.get("settings"), choices),
    "change:drawing": take,
    "change:error": () => {
      const text = model.get("error"), wrong = text.match(/^(\w+)=/)?.[1];
      error.textContent = text;
      body.classList.toggle("old", Boolean(text)); // it is not the picture of what the form says
      for (const [name, node] of Object.entries(controls)) node.ariaInvalid = name === wrong;
    },
  };
  for (const [event, react] of Object.entries(said)) {
    model.on(event, react);
    react();
  }
  const watch = new ResizeObserver(() => picture.clientWidth !== room && draw());
  watch.observe(picture);
  return () => {
    watch.disconnect();
    document.removeEventListener("pointerdown", elsewhere);
    cancelAnimationFrame(request);
    for (const [event, react] of Object.entries(said)) model.off(event, react);
  };
}

export default { render };
