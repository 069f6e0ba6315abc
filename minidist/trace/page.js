"use strict";
// Draws the trace: sentences, a bar for each replica's average step, and the timeline on a canvas.

const KINDS = { // kind: [colour, words for the legend and the tip]
  forward: ["#5b9bd5", "forward: the loss is computed"],
  backward: ["#2f5fa8", "backward: the gradients are computed"],
  waiting: ["#e8590c", "waiting for another replica"],
  reduce: ["#8e5bb5", "reduce: gradients of all replicas are added up"],
  update: ["#3f9b5c", "update: the weights change"],
  staging: ["#169c9c", "staging: copies of variables or input"],
  input: ["#c9a227", "input: the next batch"],
  work: ["#7fa3b8", "work: what a GPU has done, when it did it"],
  other: ["#b5b0a8", "everything else"],
};
const PHASE = {
  wait: "waiting", turn: "waiting", peers: "waiting", put: "staging", get: "staging", copy: "staging", fetch: "staging",
  await: "staging", read: "input",
};
const WORDS = {
  merge: "All replicas have met; this one, the last to come, does the work of the meeting for all.",
  wait: "This replica can do nothing until the other one is ready.",
  peers: "This process can do nothing until another one is ready.",
  replica: "The function that every replica runs, on its own part of the batch.",
  stream: "A piece of work of a stream, which goes on beside the replicas.",
  fetch: "A variable is copied to the replica that computes with it.",
  read: "The next batch is prepared ahead of its use.",
  run: "One run of a function on all replicas.",
  step: "One training step, with its input.",
  await: "Waits until a stream has done its work.",
  injected: "The replica was made slow on purpose, by --inject.",
  arrived: "A replica arrives at a meeting.",
  gradient: "The gradient of a variable is final.",
};
const ARROWS = {
  gradient: ["#8e5bb5", "a gradient goes into a sum"],
  sum: ["#3f9b5c", "a sum goes into the weights"],
  put: ["#169c9c", "what was put into a staging area is taken"],
  event: ["#888", "a stream's work is waited for"],
};
const FRAME = { replica: 1, run: 1, step: 1, stream: 1 };
const LABEL = 170, TOP = 34, ROW = 21, GAP = 12;

const trace = JSON.parse(document.getElementById("trace").textContent);
const { phases, verdict, steps } = trace.minidist;
const element = (tag, parent, text = "", className = "") => {
  const made = parent.appendChild(document.createElement(tag));
  made.textContent = text;
  made.className = className;
  return made;
};
const colour = (kind) => FRAME[kind] ? "#e9e6e0" : KINDS[PHASE[kind] ?? kind]?.[0] ?? KINDS.other[0];
const ms = (us) => us >= 1e4 ? `${(us / 1000).toFixed(1)} ms` : us >= 100 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(1)} µs`;

// --- sentences, bars, legend

const box = document.getElementById("verdict");
verdict.forEach((sentence) => element("p", box, sentence));
if (/^Replica/.test(verdict[0])) box.classList.add("slow");
for (const [name, [fill, words]] of Object.entries(KINDS)) {
  const item = element("span", document.getElementById("legend"));
  element("i", item, "", name === "waiting" ? "waits" : "").style.backgroundColor = fill;
  item.append(words);
}
for (const [kind, [fill, words]] of Object.entries(ARROWS)) {
  const item = element("span", document.getElementById("legend"));
  element("b", item, "⟶").style.color = fill;
  item.append(words);
}
for (const each of phases?.replicas ?? []) {
  const bar = element("div", document.getElementById("bars"), "", "bar");
  const who = element("div", bar, `replica ${each.replica} (${each.device})`, "who");
  if (box.className.includes("slow") && each.behind === Math.max(...phases.replicas.map((r) => r.behind)))
    element("b", who, " slow");
  const all = element("div", bar, "", "all");
  for (const [name, value] of Object.entries(each.phases)) {
    const share = value / phases.step;
    if (share < 0.002) continue;
    const part = element("div", all, "", name === "waiting" ? "part waits" : "part");
    part.style.cssText += `width:${100 * share}%;background-color:${KINDS[name][0]}`;
    part.title = `${name}: ${value.toFixed(3)} ms`;
    if (share > 0.13) part.textContent = `${name} ${value.toFixed(2)}`;
    else if (share > 0.045) part.textContent = value.toFixed(2);
  }
}

// --- lanes: spans in rows by how deep they are inside others

const lanes = new Map();
const arrows = new Map();
for (const event of trace.traceEvents) {
  if (event.name === "thread_name")
    lanes.set(event.tid, { label: event.args.name, role: event.args.role, spans: [], ticks: [], rows: 0 });
  const lane = lanes.get(event.tid);
  if (event.ph === "X") lane.spans.push({ ...event, end: event.ts + event.dur });
  if (event.ph === "i") lane.ticks.push(event);
  if (event.ph === "s") arrows.set(event.id, { kind: event.cat, from: event });
  if (event.ph === "f") arrows.get(event.id).to = event;
}
for (const [tid, lane] of lanes) if (!lane.spans.length) lanes.delete(tid);
for (const [id, { from, to }] of arrows) if (!lanes.has(from.tid) || !lanes.has(to.tid)) arrows.delete(id);
for (const lane of lanes.values()) {
  const open = [];
  lane.spans.sort((a, b) => a.ts - b.ts || b.dur - a.dur);
  for (const span of lane.spans) {
    while (open.length && open[open.length - 1].end <= span.ts) open.pop();
    span.row = open.length;
    open.push(span);
    lane.rows = Math.max(lane.rows, open.length);
  }
}
let height = TOP;
for (const lane of lanes.values()) {
  lane.y = height;
  height += Math.max(1, lane.rows) * ROW + GAP;
}
const all = [...lanes.values()].flatMap((lane) => lane.spans);
const last = Math.max(1, ...all.map((span) => span.end));

// --- the view: from and to are microseconds

const canvas = document.getElementById("timeline"), pen = canvas.getContext("2d");
const view = { from: 0, to: last };
const x = (at) => LABEL + (at - view.from) / (view.to - view.from) * (canvas.clientWidth - LABEL);
const at = (px) => view.from + (px - LABEL) / (canvas.clientWidth - LABEL) * (view.to - view.from);

function show(from, to) {
  const width = Math.min(Math.max(to - from, 1), last * 1.04);
  view.from = Math.min(Math.max(from, -0.02 * last), last * 1.02 - width);
  view.to = view.from + width;
  draw();
}
const zoom = (factor, around = (view.from + view.to) / 2) =>
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
const move = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
function step(way) {
  const middle = (view.from + view.to) / 2;
  let now = steps.findIndex((each) => middle < each.end);
  if (now < 0) now = steps.length - 1;
  const one = steps[Math.min(Math.max(now + way, 0), steps.length - 1)];
  if (one) show(one.start - 0.03 * (one.end - one.start), one.end + 0.03 * (one.end - one.start));
}
const actions = {
  in: () => zoom(0.6), out: () => zoom(1 / 0.6), all: () => show(0, last),
  next: () => step(1), previous: () => step(-1),
};

// --- drawing

const hatch = (() => {
  const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
  const brush = tile.getContext("2d");
  brush.strokeStyle = "#ffffff88";
  brush.lineWidth = 2;
  for (const k of [-8, 0, 8]) { brush.moveTo(k, 8); brush.lineTo(k + 8, 0); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
})();

function draw() {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.save();
  pen.beginPath();
  pen.rect(LABEL, 0, width - LABEL, height);
  pen.clip();
  drawSteps();
  let drawn = 0;
  for (const lane of lanes.values()) drawn += drawLane(lane);
  if (document.getElementById("arrows").checked) drawArrows();
  pen.restore();
  for (const lane of lanes.values()) {
    pen.fillStyle = "#ddd";
    pen.fillRect(0, lane.y - GAP / 2, width, 1);
    pen.fillStyle = "#222";
    pen.font = lane.role === "replica" ? "bold 13px system-ui, sans-serif" : "12px system-ui, sans-serif";
    pen.fillText(lane.label, 8, lane.y + ROW / 2, LABEL - 14);
  }
  canvas.dataset.drawn = drawn;
  canvas.dataset.from = view.from;
  canvas.dataset.to = view.to;
}

function drawSteps() {
  for (const { step: number, start, end } of steps) {
    if (end < view.from || start > view.to) continue;
    pen.fillStyle = "#999";
    for (let y = 0; y < height; y += 6) pen.fillRect(x(start), y, 1, 3);
    pen.fillStyle = "#444";
    const left = Math.max(LABEL, x(start)), room = Math.min(x(end), canvas.clientWidth) - left;
    if (room > 40) pen.fillText(room > 120 ? `step ${number}: ${ms(end - start)}` : `step ${number}`, left + 5, 11, room - 8);
    const grain = 10 ** Math.ceil(Math.log10(70 / (x(1) - x(0))));
    const unit = grain / 5 * (x(1) - x(0)) > 60 ? grain / 5 : grain / 2 * (x(1) - x(0)) > 60 ? grain / 2 : grain;
    pen.fillStyle = "#888";
    for (let k = Math.max(1, Math.ceil((view.from - start) / unit)); start + k * unit < Math.min(end, view.to); k++) {
      pen.fillRect(x(start + k * unit), 20, 1, 5);
      pen.fillText(`${+(k * unit / 1000).toPrecision(6)} ms`, x(start + k * unit) + 3, 23);
    }
  }
}

function drawLane(lane) {
  let drawn = 0;
  for (const span of lane.spans) {
    if (span.end < view.from || span.ts > view.to) continue;
    const left = Math.max(x(span.ts), LABEL - 2), right = Math.min(x(span.end), canvas.clientWidth + 2);
    const y = lane.y + span.row * ROW, wide = Math.max(right - left, 0.7);
    pen.fillStyle = colour(span.cat);
    pen.fillRect(left, y, wide, ROW - 2);
    if (PHASE[span.cat] === "waiting") {
      pen.fillStyle = hatch;
      pen.fillRect(left, y, wide, ROW - 2);
    }
    drawn++;
    if (wide > 26) {
      pen.fillStyle = FRAME[span.cat] ? "#555" : "#fff";
      const text = wide > 130 ? `${span.name}  ${ms(span.dur)}` : span.name;
      if (pen.measureText(text).width < wide - 6) pen.fillText(text, left + 4, y + ROW / 2 - 0.5);
      else fitted(span.name, left + 4, y + ROW / 2 - 0.5, wide - 6);
    }
  }
  for (const tick of lane.ticks) {
    if (tick.ts < view.from || tick.ts > view.to) continue;
    const px = x(tick.ts), row = lane.y + (tick.cat === "gradient" ? 2 : 1) * ROW;
    pen.fillStyle = tick.cat === "gradient" ? "#cfe0f5" : "#111";
    pen.beginPath();
    if (tick.cat === "gradient") pen.arc(px, row - 5, 2, 0, 7);
    else { pen.moveTo(px - 5, row - 8); pen.lineTo(px + 5, row - 8); pen.lineTo(px, row); }
    pen.fill();
  }
  return drawn;
}

function fitted(text, left, y, wide) {
  let length = text.length;
  while (length > 2 && pen.measureText(text.slice(0, length) + "…").width > wide) length--;
  if (length > 2) pen.fillText(text.slice(0, length) + "…", left, y);
}

function rowAt(tid, moment, deepest) {
  let row = 0;
  for (const span of lanes.get(tid).spans) {
    if (span.ts > moment) break;
    if (span.end >= moment && (deepest || span.row < 2)) row = Math.max(row, span.row);
  }
  return lanes.get(tid).y + (row + 0.5) * ROW;
}

function drawArrows() {
  const seen = [...arrows.values()].filter(({ from, to }) => to.ts >= view.from && from.ts <= view.to);
  if (seen.length > 600) return; // zoom in to see them
  for (const { kind, from, to } of seen) {
    const [x1, y1, x2, y2] = [x(from.ts), rowAt(from.tid, from.ts, true), x(to.ts), rowAt(to.tid, to.ts, true)];
    const bend = Math.max(12, Math.abs(x2 - x1) / 3);
    pen.strokeStyle = pen.fillStyle = ARROWS[kind][0];
    pen.globalAlpha = 0.75;
    pen.lineWidth = 1.3;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x2, y2);
    pen.lineTo(x2 - 7, y2 - 3.5);
    pen.lineTo(x2 - 7, y2 + 3.5);
    pen.fill();
    pen.globalAlpha = 1;
  }
}

// --- pointing: the innermost span under the pointer

const tip = document.getElementById("tip");

function under(px, py) {
  const moment = at(px), slack = 3 * (view.to - view.from) / canvas.clientWidth;
  for (const lane of lanes.values()) {
    if (py < lane.y - 2 || py > lane.y + lane.rows * ROW || px < LABEL) continue;
    const tick = lane.ticks.find((each) => each.cat === "arrived" && Math.abs(each.ts - moment) < slack);
    const row = Math.floor((py - lane.y) / ROW);
    if (tick && row === 0) return { ...tick, lane };
    const found = lane.spans.filter((s) => s.row === row && s.ts - slack / 3 <= moment && s.end + slack / 3 >= moment);
    if (found.length) return { ...found[found.length - 1], lane };
  }
  return null;
}

function tell(event) {
  const box = canvas.getBoundingClientRect();
  const span = under(event.clientX - box.left, event.clientY - box.top);
  tip.style.display = span ? "block" : "none";
  if (!span) return;
  tip.replaceChildren();
  element("b", tip, span.name + (span.dur === undefined ? "" : `: ${ms(span.dur)}`));
  element("div", tip, WORDS[span.cat] ?? KINDS[PHASE[span.cat] ?? span.cat]?.[1] ?? "");
  element("div", tip, `${span.lane.label}, ${ms(span.ts - (steps.findLast((s) => s.start <= span.ts)?.start ?? 0))} after the step's beginning`);
  for (const [key, value] of Object.entries(span.args ?? {})) {
    if (["run", "position", "role", "for"].includes(key)) continue;
    const text = key === "bytes" ? `${value.toLocaleString("en")} bytes` : `${key}: ${Array.isArray(value) ? value.join(", ") : value}`;
    element("div", tip, text);
  }
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

let grabbed = null;
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return move(event.deltaX / 1000);
  zoom(Math.exp(event.deltaY / 500), at(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  grabbed = { x: event.clientX, from: view.from, to: view.to };
  canvas.setPointerCapture?.(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!grabbed) return tell(event);
  tip.style.display = "none";
  const shift = (grabbed.x - event.clientX) / (canvas.clientWidth - LABEL) * (grabbed.to - grabbed.from);
  show(grabbed.from + shift, grabbed.to + shift);
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { grabbed = null; });
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, n: actions.next, p: actions.previous,
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
for (const button of document.querySelectorAll("button")) button.onclick = () => actions[button.dataset.do]();
document.getElementById("arrows").onchange = draw;
addEventListener("resize", draw);

// The last two steps are what one sees first.
const first = steps[Math.max(0, steps.length - 2)];
if (first) show(first.start - 0.02 * (last - first.start), last);
else show(0, last);
