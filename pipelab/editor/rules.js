// The rules of a table that is being made, as in puzzle/draft.py: Python writes what each action of a task takes and
// needs (puzzle/data.py), so nothing here knows of slices, weight versions or costs. A test holds both sides together.
//
// A task's actions are numbers from 0, device after device; rows are arrays of them, and moves return new rows.

function readTask(data) {
  const names = data.rows.split("~").map((row) => row.split("_")), actions = names.flat();
  const of = actions.map((name) => name.match(/^(\d+)([A-Z])(\d+)$/).slice(1)), kind = of.map(([, letter]) => letter);
  return {
    ...data, actions, kind, device: names.flatMap((row, d) => row.map(() => d)), devices: names.length,
    stage: of.map(([s]) => +s), microbatch: of.map(([, , k]) => +k),
    index: new Map(actions.map((name, a) => [name, a])),
    way: (need, a) => data.ways[`${need}>${a}`] ?? 0,
    cap: (device) => data.caps?.[device] ?? Infinity,
    step: (a) => (kind[a] === "F") - (kind[a] === data.releases), // of what its device holds
  };
}

const emptyRows = (task) => Array.from({ length: task.devices }, () => []);
const writeRows = (task, rows) => rows.map((row) => row.map((a) => task.actions[a]).join("_")).join("~");
const isWhole = (task, rows) => rows.flat().length === task.actions.length;
const leftOf = (task, rows, device) => task.actions.map((_, a) => a).filter((a) => task.device[a] === device && !rows[device].includes(a));
const insert = (rows, device, index, a) => rows.map((row, d) => (d === device ? row.toSpliced(index ?? row.length, 0, a) : row));
const without = (rows, a) => rows.map((row) => row.filter((other) => other !== a));
const fulfilled = (task, done, a) => task.needs[a].every((need) => done.has(need));

// What each device holds for a backward after each action of its row.
function heldIn(task, row) {
  let held = 0;
  return row.map((a) => (held += task.step(a)));
}

const overCap = (task, rows) => rows.findIndex((row, d) => heldIn(task, row).some((held) => held > task.cap(d)));

// When every action runs, as far as rows can: start, end, how many of each row run, and the makespan.
function timesOf(task, rows) {
  const start = new Map(), end = new Map(), heads = rows.map(() => 0), clock = rows.map(() => 0);
  for (let moved = true; moved;) {
    moved = false;
    rows.forEach((row, d) => {
      for (let a; (a = row[heads[d]]) !== undefined && fulfilled(task, end, a); heads[d]++, moved = true) {
        const there = task.needs[a].map((need) => end.get(need) + task.way(need, a));
        start.set(a, Math.max(clock[d], ...there) + task.wait);
        end.set(a, (clock[d] = start.get(a) + task.seconds[a]));
      }
    });
  }
  // Updates that follow by themselves count.
  const ends = clock.map((time, d) => time + (rows[d].length ? task.after[d] : 0));
  return { start, end, heads, makespan: Math.max(...ends) - Math.min(...start.values()) };
}

// The actions that run, and the first of each row that does not: it waits, or would exceed its device's cap.
function running(task, rows) {
  const done = new Set(), heads = rows.map(() => 0), held = rows.map(() => 0);
  const goes = (a, d) => a !== undefined && fulfilled(task, done, a) && held[d] + task.step(a) <= task.cap(d);
  for (let moved = true; moved;) {
    moved = false;
    rows.forEach((row, d) => {
      for (; goes(row[heads[d]], d); heads[d]++, moved = true) {
        done.add(row[heads[d]]);
        held[d] += task.step(row[heads[d]]);
      }
    });
  }
  return { done, stuck: rows.map((row, d) => row[heads[d]]).filter((a) => a !== undefined) };
}

// The rows without what cannot run: of rows that all wait, one goes on without an action that needs what none of them
// has; if there is no such action, they wait for each other, and the first row does.
function settled(task, rows) {
  const { stuck } = running(task, rows), placed = new Set(rows.flat());
  if (!stuck.length) return rows;
  return settled(task, without(rows, stuck.find((a) => !fulfilled(task, placed, a)) ?? stuck[0]));
}

// Whether rows within the cap can become whole. What is no forward only gives room back, so all of it that can run does.
// Then it is the banker's question: has one micro-batch room to go on to its last stage? It gives back what it held.
function canFinish(task, rows) {
  if (overCap(task, rows) >= 0) return false;
  if (!task.caps || !task.banker) return true;
  const done = new Set(rows.flat()), room = rows.map((row, d) => task.cap(d) - (heldIn(task, row).at(-1) ?? 0));
  for (;;) {
    let waiting = task.actions.map((_, a) => a).filter((a) => !done.has(a));
    for (let able; (able = waiting.filter((a) => task.kind[a] !== "F" && fulfilled(task, done, a))).length;) {
      for (const a of able) done.add(a), (room[task.device[a]] -= task.step(a));
      waiting = waiting.filter((a) => !done.has(a));
    }
    const forwards = waiting.filter((a) => task.kind[a] === "F"), sequence = (a) => Math.floor(task.microbatch[a] / task.slices);
    if (!forwards.length) return true;
    const each = [...new Set(forwards.map(sequence))].sort((k, l) => k - l); // an early one gives back first
    const goes = each.map((k) => forwards.filter((a) => sequence(a) === k)).find((coming) => {
      const after = new Set([...done, ...coming]), taken = room.map((_, d) => coming.filter((a) => task.device[a] === d).length);
      return taken.every((n, d) => !n || n <= room[d]) && coming.every((a) => fulfilled(task, after, a));
    });
    if (!goes) return false;
    for (const a of goes) done.add(a), (room[task.device[a]] -= 1);
  }
}

// Place an action at the end of its row, or at an index of it; `until` is the end of the gap in which it has to start.
// Returns the new rows, or why not: {why, ...} with the action or the device that stands in the way.
function place(task, rows, a, index = null, until = null) {
  const placed = new Set(rows.flat()), device = task.device[a];
  if (placed.has(a)) return { why: "placed" };
  const need = task.needs[a].find((other) => !placed.has(other));
  if (need !== undefined) return { why: "needs", need };
  const after = insert(rows, device, index, a), { start, end, heads } = timesOf(task, after);
  if (heads.some((n, d) => n < after[d].length)) return { why: "circle" };
  const over = overCap(task, after);
  if (over >= 0) return { why: "full", device: over };
  if (until !== null && start.get(a) >= until) {
    return { why: "late", need: task.needs[a].find((other) => end.get(other) + task.way(other, a) + task.wait >= start.get(a)) };
  }
  return canFinish(task, after) ? { rows: after } : { why: "stuck" };
}

// Every action that may be placed at the end of its row.
function readyActions(task, rows) {
  const placed = new Set(rows.flat()), able = task.actions.map((_, a) => a).filter((a) => !placed.has(a) && fulfilled(task, placed, a));
  return able.filter((a) => task.kind[a] !== "F" || canFinish(task, insert(rows, task.device[a], null, a)));
}

// Rows of their text, such as 0F0_0F1~1F0: without what this task does not have and what cannot run.
function readRows(task, text) {
  const rows = emptyRows(task);
  for (const name of text.split(/[~_]/)) {
    const a = task.index.get(name);
    if (a !== undefined && !rows.flat().includes(a)) rows[task.device[a]].push(a);
  }
  return settled(task, rows);
}
