// A picture of timelines: unpacking Python's data, the layout, the shapes.

const LEFT = 62, TOP = 6, AXIS = 22; // pixels
const NARROW = 560, LEGIBLE = 17, WIDEST = 5; // a narrower picture scrolls; pixels of a short action, and screens at most

function unpack(text, rows) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = letters.charCodeAt(k); // ten times faster than Uint8Array.from
  const all = new Float32Array(bytes.buffer), n = all.length / rows;
  return Array.from({ length: rows }, (_, k) => all.subarray(k * n, (k + 1) * n));
}

// Where everything stands: a row for each device of each timeline, from top to bottom, and pixels for seconds.
function layout(drawing, width) {
  const items = drawing.timelines.map((t) => {
    const columns = unpack(t.data, t.columns.length);
    const byName = Object.fromEntries(t.columns.map((name, k) => [name, columns[k]]));
    return { ...t, ...byName, steps: t.steps && unpack(t.steps, drawing.causes.length + 1) };
  });
  const devices = Math.max(...items.map((t) => t.bounds.length - 1));
  const heights = [[4, 24, 30, 8], [8, 22, 20, 6], [16, 17, 13, 6], [Infinity, 9, 9, 3]]; // [devices at most, ...]
  const [, lane, memory, gap] = heights.find(([most]) => devices <= most);
  const strip = drawing.memory ? memory : 0, rows = [];
  let y = TOP;
  for (const t of items) {
    t.heading = y + 8;
    y += items.length > 1 ? 24 : 0;
    for (let d = 0; d + 1 < t.bounds.length; d++, y += lane + strip + gap) rows.push({ t, device: d, y });
    y += 8;
  }
  const peaks = strip > 9 ? items.flatMap((t) => t.peaks.map((text) => text.length)) : [0];
  const right = width - (drawing.memory ? 12 + 6.5 * Math.max(4, ...peaks) : 12);
  const scale = (right - LEFT) / (drawing.end || 1), bottom = y - 6;
  return { items, rows, lane, strip, right, bottom, height: bottom + AXIS + 6, scale, x: (time) => LEFT + time * scale };
}

// Where an action's box begins in its lane, and what share it fills: two that overlap get half each.
const share = (t, i) => (t.joined.includes(i) ? [0.5, 0.5] : t.joined.includes(i + 1) ? [0, 0.5] : [0, 1]);

// The boxes: one path for each colour, however many actions there are, and numbers where they fit; all, or only the lit ones.
function boxes({ rows, lane, right, scale, x }, { letters }, hatch, lit) {
  const paths = new Map(), idle = [], instants = [], texts = [];
  const longest = Math.max(...rows.map(({ t, device }) => t.bounds[device + 1] - t.bounds[device]));
  const thick = round(Math.min(1.4, (0.3 * (right - LEFT)) / longest)); // of an instant, thin where actions are
  for (const { t, device, y } of rows) {
    let free = 0; // when the device has finished what came before
    const rest = (until) => until - free > 1e-6 * t.makespan && idle.push(box(x(free), y, (until - free) * scale, lane));
    for (let i = t.bounds[device]; i < t.bounds[device + 1]; i++) {
      rest(t.start[i]);
      free = Math.max(free, t.end[i]);
      if (lit && !lit.has(i)) continue;
      const left = x(t.start[i]), w = (t.end[i] - t.start[i]) * scale, [fill, ink] = t.colours[t.colour[i]];
      const [from, part] = share(t, i), top = y + from * lane, tall = part * lane;
      if (w < 0.01) {
        instants.push(`M${round(left)} ${y}v${lane}`); // such as an update that takes no time
        continue;
      }
      if (!paths.has(fill)) paths.set(fill, []);
      paths.get(fill).push(w > 4 ? box(left + 0.5, top, w - 1, tall) : box(left, top, w, tall));
      const size = letters[t.kind[i]] === "U" ? 0 : Math.min(11, tall * 0.7, (w - 4) / (0.6 * t.digits));
      if (size >= 7) texts.push(label(left + w / 2, top + tall / 2, t.microbatch[i], `font-size:${round(size)}px;fill:${ink}`));
    }
    rest(t.makespan);
  }
  const coloured = [...paths].map(([fill, path]) => `<path class="boxes" fill="${fill}" d="${path.join("")}"/>`);
  return `<path fill="url(#${hatch})" d="${lit ? "" : idle.join("")}"/>${coloured.join("")}
    <path class="instants" stroke-width="${thick}" d="${instants.join("")}"/><g class="numbers">${texts.join("")}</g>`;
}

// Memory below each lane: every cause as an area from the base to its top, the lower ones drawn over the higher.
function strips({ rows, lane, strip, right, scale, x }, { causes, memory }) {
  if (!memory) return "";
  const paths = causes.map(() => []), bases = [], peaks = [], high = (strip - 3) / memory;
  for (const { t, device, y } of rows) {
    const base = y + lane + strip, [time, ...tops] = t.steps, from = t.step_bounds[device], to = t.step_bounds[device + 1];
    tops.forEach((top, c) => {
      paths[c].push(`M${round(x(time[from] ?? 0))} ${base}`);
      for (let k = from; k < to; k++) {
        paths[c].push(`V${round(base - top[k] * high)}H${round(x(k + 1 < to ? time[k + 1] : t.makespan))}`);
      }
      paths[c].push(`V${base}z`);
    });
    bases.push(`M${LEFT} ${base}h${round(t.makespan * scale)}`);
    if (strip > 9) peaks.push(label(right + 6, base - strip / 2, t.peaks[device]));
  }
  const areas = paths.map((path, c) => `<path fill="${causes[c][1]}" d="${path.join("")}"/>`).reverse().join("");
  return `<g class="memory ${strip > 9 ? "edged" : ""}">${areas}</g><path class="base" d="${bases.join("")}"/>
    <g class="peaks">${peaks.join("")}</g>`;
}

// How wide a picture is drawn: on a phone, wide enough for numbers in boxes.
function widthOf(drawing, room) {
  if (room >= NARROW) return room;
  const { items, scale, right } = layout(drawing, room), all = items.flatMap(({ start, end }) => Array.from(start, (s, i) => end[i] - s));
  const spans = all.filter((span) => span > 0).sort((a, b) => a - b), usual = spans[Math.floor(spans.length / 10)];
  const times = Math.min(Math.max(LEGIBLE / (usual * scale) || 1, 1), WIDEST);
  return Math.round(room + (right - LEFT) * (times - 1));
}

function frame({ strip, right, bottom, x }, { end, memory }) {
  const times = ticks(end, right - LEFT), below = bottom + AXIS / 2;
  const marked = times.filter((time) => !memory || x(time) < right - 14); // the column of peaks has its own heading
  const grid = times.map((time) => `M${round(x(time)) + 0.5} ${TOP - 2}V${bottom}`).join("");
  return `<path class="grid" d="${grid}"/>
    <g class="times">${marked.map((time) => label(x(time), below, number(time))).join("")}</g>
    <g class="peaks">${memory && strip > 9 ? label(right + 6, below, "peak") : ""}</g>`;
}

// Names of rows and timelines.
const names = ({ items, rows, lane, bottom }) => `<rect class="paper" width="${LEFT - 4}" height="${bottom}"/>
  <g class="devices">${rows.map((row) => label(LEFT - 8, row.y + lane / 2, `device ${row.device}`)).join("")}</g>
  <g class="heads">${items.length > 1 ? items.map((t) => label(LEFT, t.heading, t.name)).join("") : ""}</g>`;

const entry = ([text, colour]) => html("span", {}, html("i", { style: `background:${colour}` }), text);
const legendOf = ({ legend, lighter }) =>
  [...legend.map(entry), html("span", {}, html("i", { className: "hatched" }), "idle"), ...(lighter ? [html("span", {}, lighter)] : [])];
