// A derivation in the browser: a formula, a sentence, and the boxes that they are about.

function render({ model, el }) {
  const { title, formula, spoken, drawing, steps } = model.get("shown"), hatch = `pipelab-idle-${++patterns}`;
  const terms = html("div", { className: "formula", role: "math", ariaLabel: spoken, innerHTML: formula });
  const room = steps.map(({ says }) => html("p", { className: "room", ariaHidden: true, innerHTML: says }));
  const sentence = html("p", { ariaLive: "polite" }), count = html("output", { className: "clock" });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("role", "img");
  const picture = html("div", { className: "picture", onclick: () => slider.focus() }, svg);
  const slider = html("input", { type: "range", min: 0, max: steps.length - 1, value: 0, ariaLabel: "step" });
  const button = (textContent, ariaLabel, by) => html("button", { type: "button", textContent, ariaLabel, onclick: () => go(now + by) });
  const bar = html("div", { className: "bar" }, button("‹", "back", -1), slider, button("›", "forward", 1), count);
  const legend = html("span", { className: "legend" });
  const root = html("div", { className: "pipelab-explorer pipelab-derivation" },
    html("div", { className: "title", role: "heading", ariaLevel: 3, innerHTML: title }), terms,
    html("div", { className: "sentences" }, ...room, sentence), picture, bar, html("div", { className: "bar" }, legend));
  for (const node of bar.children) node.setAttribute("data-lm-suppress-shortcuts", ""); // keys typed here are not the notebook's commands
  el.append(root);
  let now = 0;

  function draw() {
    const width = picture.clientWidth;
    if (width < 200) return; // not laid out yet
    const places = drawing.timelines.map((t) => layout({ ...drawing, timelines: [t] }, width));
    svg.setAttribute("width", width);
    svg.setAttribute("height", places[0].height);
    const ends = ({ items: [{ makespan }], rows, x, right, bottom }) =>
      right - x(makespan) > 50 ? `<g class="end">${label(x(makespan) + 8, (rows[0].y + bottom) / 2, number(makespan))}</g>` : "";
    const all = places.map((place) => `<g class="lanes">${boxes(place, drawing, hatch)}${ends(place)}</g>`);
    const lit = steps.map(({ timeline, boxes: some, gaps }) => {
      const place = places[timeline], { rows, lane, scale, x } = place;
      const gap = ([device, from, until]) => {
        const wide = (until - from) * scale, y = rows[device].y, length = number(until - from);
        const text = wide > 9 * length.length ? label(x(from) + wide / 2, y + lane / 2, length) : "";
        return `<path class="gap" d="${box(x(from), y, wide, lane)}"/>${text}`;
      };
      return `<g class="lit"><g class="gaps">${gaps.map(gap).join("")}</g>${boxes(place, drawing, hatch, new Set(some))}</g>`;
    });
    svg.innerHTML = `${hatching(hatch)}${frame(places[0], drawing)}${names(places[0])}${all.join("")}${lit.join("")}`;
    show();
  }

  function show() {
    const { says, terms: read, timeline, boxes: some, gaps } = steps[now], { name, summary, lighter } = drawing.timelines[timeline];
    const each = (selector, react) => root.querySelectorAll(selector).forEach(react);
    each(".lanes", (node, k) => (node.classList.toggle("seen", k === timeline), node.classList.toggle("faint", some.length + gaps.length > 0)));
    each(".lit", (node, k) => node.classList.toggle("seen", k === now));
    each("[data-term]", (node) => node.classList.toggle("read", read.includes(node.dataset.term)));
    if (sentence.innerHTML !== says) sentence.innerHTML = says;
    svg.setAttribute("aria-label", `${name}: ${summary}`);
    legend.replaceChildren(...legendOf({ ...drawing, lighter }));
    count.textContent = `${now + 1} of ${steps.length}: ${name}`;
    slider.value = now;
  }

  function go(step) {
    now = Math.min(Math.max(step, 0), steps.length - 1);
    show();
  }

  slider.oninput = () => go(+slider.value);
  root.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (!by) return;
    event.preventDefault();
    go(now + by);
  };
  terms.onclick = ({ target }) => {
    const { term } = target.closest("[data-term]")?.dataset ?? {}, found = steps.findIndex((step) => step.terms.includes(term));
    if (found >= 0) go(found);
  };
  show();
  const watch = new ResizeObserver(() => picture.clientWidth !== +svg.getAttribute("width") && draw());
  watch.observe(picture);
  return () => watch.disconnect();
}

export default { render };
