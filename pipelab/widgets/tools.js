// What the widgets share: small tools to make HTML and SVG.

let patterns = 0; // widgets on one page need different ids

function html(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const number = (x) => String(+x.toPrecision(5));
const round = (x) => Math.round(x * 100) / 100;
const box = (x, y, w, h) => `M${round(x)} ${round(y)}h${round(w)}v${h}h${round(-w)}z`;

function label(x, y, text, style = "") {
  const safe = String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  return `<text x="${round(x)}" y="${round(y)}" dy=".35em" style="${style}">${safe}</text>`;
}

// Lines at an angle, for idle time.
function hatching(id) {
  const pattern = `id="${id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"`;
  return `<defs><pattern ${pattern}><path class="hatch" d="M0 0V6"/></pattern></defs>`;
}

// Put a note beside a box of a picture: below it, or above where the window ends; within the host's width.
function standBeside(note, host, box) {
  const { left, top } = host.getBoundingClientRect(), room = host.clientWidth - note.offsetWidth;
  const below = box.bottom + 8 + note.offsetHeight <= innerHeight || box.top - note.offsetHeight < 8;
  note.style.left = `${round(Math.max(0, Math.min((box.left + box.right - note.offsetWidth) / 2 - left, room)))}px`;
  note.style.top = `${round(below ? box.bottom - top + 8 : box.top - top - 8 - note.offsetHeight)}px`;
}

// Names on the left of a picture stay in sight while it is scrolled.
const follow = ({ target }) => target.querySelector(".names").setAttribute("transform", `translate(${target.scrollLeft})`);

// Round times from 0 to the end, about 70 pixels apart.
function ticks(end, room) {
  const rough = (end || 1) / Math.max(2, Math.floor(room / 70)), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((f) => f * power >= rough) * power;
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, k) => k * step);
}
