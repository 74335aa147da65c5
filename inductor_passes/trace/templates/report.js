"use strict";
(() => {
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const root = document.documentElement;

// ---- values for people -------------------------------------------------------------------------------------------
const scaled = (value, units, base) => {
  for (const [factor, unit] of units)
    if (Math.abs(value) >= factor) {
      const x = value / factor;
      return (Math.abs(x) < 999.5 ? Number(x.toPrecision(3)).toString() : x.toFixed(0)) + " " + unit;
    }
  return Math.round(value) + " " + base;
};
const time = (ns) => scaled(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]], "ns");
const size = (b) => scaled(b, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]], "B");
const change = (a, b) => (a ? ((100 * (b - a)) / a).toFixed(1).replace(/^(?=\d)/, "+") + "%" : "");

// ---- elements: text only ever goes in as text --------------------------------------------------------------------
const el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {}))
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== "") node.append(child);
  return node;
};
const fill = (id, ...children) => byId(id).replaceChildren(...children.flat().filter((c) => c !== null && c !== undefined));
const empty = (text) => el("p", { class: "empty" }, text);

// Rows beyond this are laid out only on demand: thousands of them would hold up the page.
const MOST_ROWS = 200;

// A table whose heads sort. columns: {head, value(row), show(row), number}
const sortable = (columns, rows, { sortBy, descending, rowAttributes } = {}) => {
  let by = sortBy ?? -1, down = descending ?? false;
  const table = el("table");
  let limit = MOST_ROWS;
  const draw = () => {
    const sorted = by < 0 ? rows : rows.slice().sort((a, b) => {
      const x = columns[by].value(a), y = columns[by].value(b);
      const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
      return down ? -order : order;
    });
    const heads = columns.map((column, k) => el("th", {
      class: column.number ? "n" : null, scope: "col",
      "aria-sort": k === by ? (down ? "descending" : "ascending") : null,
    }, el("button", { type: "button", on: { click: () => {
      if (by === k) down = !down; else { by = k; down = Boolean(column.number); }
      draw();
      table.querySelectorAll("th button")[k].focus();
    } } }, column.head + (k === by ? (down ? " ↓" : " ↑") : ""))));
    table.replaceChildren(
      el("thead", {}, el("tr", {}, heads)),
      el("tbody", {}, sorted.slice(0, limit).map((row) => el("tr", rowAttributes ? rowAttributes(row) : {},
        columns.map((column) => el("td", { class: column.number ? "n" : null, "data-head": column.head }, column.show ? column.show(row) : column.value(row)))))),
      sorted.length > limit ? el("tfoot", {}, el("tr", {}, el("td", { colspan: columns.length },
        el("button", { type: "button", on: { click: () => { limit = Infinity; draw(); } } }, `Show all ${sorted.length} rows`)))) : "",
    );
  };
  draw();
  return table;
};
const activates = (action) => ({
  click: action,
  keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); action(); } },
});

// ---- state -------------------------------------------------------------------------------------------------------
let current = 0;
let views = [];
const lastSchedule = (report) => report.schedules[report.schedules.length - 1];

const themes = ["system", "dark", "light"];
byId("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
  if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
  byId("theme").textContent = "Theme: " + next;
  paint();
});

// ---- sections ----------------------------------------------------------------------------------------------------
const overview = () => {
  if (!data.graphs.length) {
    fill("overview", empty("No graph of inductor_passes in this trace."));
    return;
  }
  const of = (g, key) => { const s = lastSchedule(g.report); return s ? s[key] : 0; };
  const pair = (g, before, after, show) => lastSchedule(g.report)
    ? [show(of(g, before)), " → ", show(of(g, after)), el("span", { class: "sub" }, change(of(g, before), of(g, after)))] : "-";
  fill("overview", sortable([
    { head: "Graph", value: (g) => g.title },
    { head: "Step, predicted", number: true, value: (g) => of(g, "makespan_after_ns"), show: (g) => pair(g, "makespan_before_ns", "makespan_after_ns", time) },
    { head: "Exposed", number: true, value: (g) => of(g, "exposed_after_ns"), show: (g) => pair(g, "exposed_before_ns", "exposed_after_ns", time) },
    { head: "Peak memory", number: true, value: (g) => of(g, "peak_after_bytes"), show: (g) => pair(g, "peak_before_bytes", "peak_after_bytes", size) },
    { head: "Tasks", number: true, value: (g) => of(g, "tasks") },
    { head: "Collectives", number: true, value: (g) => g.report.collectives.length },
    { head: "State", value: (g) => tags(g).length, show: tags },
  ], data.graphs, { rowAttributes: (g) => ({
    class: "go", tabindex: 0, "aria-selected": data.graphs.indexOf(g) === current,
    on: activates(() => select(data.graphs.indexOf(g))),
  }) }));
};

const stays = (report) => report.passes.filter((pass) => pass.changed && !pass.rolled_back).map((pass) => pass.name).join(" and ");

const tags = (g) => {
  const report = g.report, list = [];
  if (report.from_cache) list.push(el("span", { class: "tag" }, "from cache"));
  for (const pass of report.passes) if (pass.rolled_back) list.push(el("span", { class: "tag warn" }, pass.name + " rolled back"));
  if (g.differences.length) list.push(el("span", { class: "tag bad" }, "ranks differ"));
  if (!report.schedules.length) list.push(el("span", { class: "tag" }, stays(report) ? "no order planned" : "nothing planned"));
  return list;
};

const summary = (g) => {
  const report = g.report, s = lastSchedule(report);
  fill("state", tags(g), report.region ? el("span", { class: "hint" }, `Names of parameters are those of the compiled region, a ${report.region}.`) : null);
  if (!s) { fill("cards", empty(stays(report) ? `No order was planned for this graph; what ${stays(report)} changed stays.` : "Nothing was planned for this graph.")); return; }
  const card = (title, value, sub, quality) => el("div", { class: "card" },
    el("span", {}, title), el("b", { class: quality || (value.length > 14 ? "long" : null) }, value), el("span", {}, sub));
  const over = s.budget_bytes !== null && s.peak_after_bytes > s.budget_bytes;
  const faster = s.makespan_after_ns < s.makespan_before_ns;
  const all = report.schedules.find((one) => one.came_ns);
  fill("cards",
    card("Predicted step", time(s.makespan_after_ns), `before ${time(s.makespan_before_ns)} (${change(s.makespan_before_ns, s.makespan_after_ns) || "0%"})`, faster ? "good" : ""),
    all && all.came_ns !== all.makespan_before_ns ? card("Step with all passes", time(all.makespan_after_ns), `${time(all.came_ns)} as it came (${change(all.came_ns, all.makespan_after_ns) || "0%"}), before fusion${all.costs ? ", by the plan's own costs" : ""}`, all.makespan_after_ns < all.came_ns ? "good" : "") : null,
    g.measured && g.measured.step ? card("Measured step", time(g.measured.step[1]), `predicted ${time(g.measured.step[0])}, rank ${g.measured.rank}, ${g.measured.steps} profiled`, "") : null,
    card("Exposed communication", time(s.exposed_after_ns), `before ${time(s.exposed_before_ns)}, of ${time(s.communication_ns)}`, s.exposed_after_ns < s.exposed_before_ns ? "good" : ""),
    card("Peak memory", size(s.peak_after_bytes), `before ${size(s.peak_before_bytes)}, ` + (s.budget_bytes === null ? "no budget" : `budget ${size(s.budget_bytes)}`), over ? "bad" : ""),
    card("Distance to the limit", s.gap === null ? "-" : (100 * s.gap).toFixed(1) + "%", `no order beats ${time(s.lower_bound_ns)}` + ({ "this budget": " within the budget", "all orders tried": "; all were tried" }[s.bound_on] || ", whatever its memory"), ""),
    card("Plan", report.digest || s.digest, `${s.method || "-"}, ${s.tasks} tasks (${s.level})`, ""),
    card("Costs", report.cost_profile || "-", report.order_check ? "order: " + report.order_check : "", ""));
};

const help = (g) => {
  const found = new Map();
  for (const c of g.report.collectives) if (c.setting && c.gain_ns > 0) {
    const key = c.reason + "|" + c.setting;
    const entry = found.get(key) || { reason: c.reason, setting: c.setting, gain: c.gain_ns, count: 0, exposed: 0 };
    entry.count += 1; entry.exposed += c.exposed_ns;
    found.set(key, entry);
  }
  const rows = [...found.values()];
  fill("help", rows.length ? sortable([
    { head: "Change", value: (r) => r.setting },
    { head: "Gain, whole graph", number: true, value: (r) => r.gain, show: (r) => time(r.gain) },
    { head: "Because", value: (r) => r.reason },
    { head: "Collectives", number: true, value: (r) => r.count },
    { head: "Exposed now", number: true, value: (r) => r.exposed, show: (r) => time(r.exposed) },
  ], rows, { sortBy: 1, descending: true }) : empty("Nothing exposed for which a change is known to help."));
};

const carried = (names) => (names || []).map((name) => el("span", { class: "sub name" }, name));
const parameterText = (p) => p.name + (p.module === p.name.split(".").slice(0, -1).join(".") ? "" : ` (read in ${p.module || "the region"})`);
const collectives = (g) => {
  const rows = g.report.collectives, measured = g.measured;
  const times = (c, what) => (measured && measured.collectives[c.label] || {})[what];
  const columnOf = (head, what, k) => ({ head, number: true, value: (c) => (times(c, what) || [0, 0])[k], show: (c) => (times(c, what) ? time(times(c, what)[k]) : "") });
  const columns = [
    { head: "Collective", value: (c) => c.label, show: (c) => [c.label, el("span", { class: "sub" }, c.kind + (c.bucket ? ", " + c.bucket : "")), ...carried((c.parameters || []).map(parameterText))] },
    { head: "Size", number: true, value: (c) => c.size_bytes, show: (c) => size(c.size_bytes) },
    { head: "Lane", value: (c) => c.lane, show: (c) => [c.lane, c.ranks.length ? el("span", { class: "sub line" }, ranksText(c.ranks)) : null] },
    { head: "Hidden", number: true, value: (c) => c.hidden_ns, show: (c) => time(c.hidden_ns) },
    { head: "Exposed", number: true, value: (c) => c.exposed_ns, show: (c) => time(c.exposed_ns) },
    ...(measured ? [columnOf("Exposed, measured", "exposed", 1), columnOf("Transfer, predicted", "transfer", 0), columnOf("Transfer, measured", "transfer", 1)] : []),
    { head: "Exposed before", number: true, value: (c) => c.exposed_before_ns, show: (c) => time(c.exposed_before_ns) },
    { head: "Why", value: (c) => c.reason, show: (c) => [c.reason, c.detail ? el("span", { class: "sub" }, c.detail) : null] },
    { head: "What would help", value: (c) => c.setting, show: (c) => [c.setting, c.gain_ns ? el("span", { class: "sub" }, "gain " + time(c.gain_ns)) : null] },
    { head: "Source", value: (c) => c.source },
  ];
  const draw = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.filter((c) => {
      const text = [c.label, c.name, c.kind, c.lane, c.reason, c.setting, c.source, c.bucket, ...(c.parameters || []).map((p) => p.name)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    byId("count").textContent = `${shown.length} of ${rows.length}`;
    fill("collectives", rows.length ? sortable(columns, shown, { sortBy: 4, descending: true, rowAttributes: (c) => ({
      class: "go", tabindex: 0, title: "show in the timeline", on: activates(() => zoomTo(c)),
    }) }) : empty("No collectives."));
  };
  byId("filter").oninput = draw;
  draw();
};

const ranksText = (ranks) => {
  const step = ranks.length > 1 ? ranks[1] - ranks[0] : 1;
  const even = ranks.every((rank, k) => rank === ranks[0] + k * step);
  if (ranks.length === 1) return "rank " + ranks[0];
  return even && ranks.length > 2 ? `ranks ${ranks[0]}-${ranks[ranks.length - 1]}` + (step === 1 ? "" : ` step ${step}`) : "ranks " + ranks.join(", ");
};

const ASYNC_TP = "async_tp";
const decisionList = (passes) => passes.filter((p) => p.decisions.length).map((pass) => {
    const applied = pass.decisions.filter((d) => d.verdict === "applied").length;
    const box = el("details", { open: pass.decisions.length <= 60 },
      el("summary", {}, `${pass.name}: ${applied} applied, ${pass.decisions.length - applied} refused`));
    const content = () => {
      if (box.open && box.children.length === 1) box.append(el("div", { class: "scroll" }, sortable([
        { head: "What", value: (d) => d.subject },
        { head: "Node", value: (d) => d.node, show: (d) => [d.node, d.group ? el("span", { class: "sub" }, d.group) : null, ...carried(d.parameters)] },
        { head: "Verdict", value: (d) => d.verdict, show: (d) => el("span", { class: "tag " + (d.verdict === "applied" ? "good" : "") }, d.verdict) },
        { head: "Reason", value: (d) => d.reason, show: (d) => [d.reason, d.detail ? el("span", { class: "sub" }, d.detail) : null] },
        { head: "Gain", number: true, value: (d) => d.gain_ns, show: (d) => (d.gain_ns ? time(d.gain_ns) : "") },
        { head: "Setting", value: (d) => d.setting },
        { head: "Source", value: (d) => d.source },
      ], pass.decisions)));
    };
    box.addEventListener("toggle", content);
    content();
    return box;
  });
const decisions = (g) => {
  const parts = decisionList(g.report.passes.filter((p) => p.name !== ASYNC_TP));
  fill("decisions", parts.length ? parts : empty("No decisions were recorded."));
};
const asyncTp = (g) => {
  const own = g.report.passes.filter((p) => p.name === ASYNC_TP), parts = decisionList(own);
  fill("async-tp", parts.length ? parts : empty(own.length ? "No matmul next to a collective that could be cut."
    : "Switched off; the setting async_tp=\"auto\" cuts matmuls and their collectives where it pays."));
};
const redistributions = (g) => {
  const rows = g.report.redistributions || [];
  const asked = (r) => (r.explicit === null ? "" : r.explicit ? "asked for" : "implicit");
  fill("redistributions", rows.length ? sortable([
    { head: "Caused by", value: (r) => r.call, show: (r) => [r.call || "unknown call", r.source ? el("span", { class: "sub line" }, r.source) : null, ...carried(r.parameters)] },
    { head: "Layouts", value: (r) => r.placements.join(), show: (r) => r.placements.map((p) => el("div", {}, p)) },
    { head: "Kind", value: asked },
    { head: "Collectives", value: (r) => r.names.join(), show: (r) => r.names.join(", ") },
    { head: "Sent per rank, before", number: true, value: (r) => r.bytes_before, show: (r) => size(r.bytes_before) },
    { head: "After", number: true, value: (r) => r.bytes_after, show: (r) => [size(r.bytes_after), el("span", { class: "sub" }, change(r.bytes_before, r.bytes_after))] },
    { head: "Rewrites", value: (r) => r.rewrites.join(), show: (r) => [r.rewrites.join(", "), ...r.refused.map((t) => el("span", { class: "sub" }, t))] },
  ], rows, { sortBy: 4, descending: true }) : empty("No redistribution was recorded for this graph."));
};

const narrowed = (g) => {
  const rows = g.report.narrowed || [], measured = rows.some((n) => n.runs);
  const share = (e) => Number(e.toPrecision(2)).toString();
  const error = (n, e) => el("span", { class: n.largest > n.bound ? "tag bad" : null }, share(e));
  fill("narrowed", rows.length ? sortable([
    { head: "Collective", value: (n) => n.label, show: (n) => [n.label, el("span", { class: "sub" }, n.kind), n.source ? el("span", { class: "sub line" }, n.source) : null, ...carried(n.parameters)] },
    { head: "Sent as", value: (n) => n.form, show: (n) => n.form + (n.block > 1 ? `, blocks of ${n.block}` : "") },
    { head: "Sent per rank, before", number: true, value: (n) => n.bytes_before, show: (n) => size(n.bytes_before) },
    { head: "After", number: true, value: (n) => n.bytes_after, show: (n) => [size(n.bytes_after), el("span", { class: "sub" }, change(n.bytes_before, n.bytes_after))] },
    { head: "Link time saved", number: true, value: (n) => n.link_before_ns - n.link_after_ns, show: (n) => [time(n.link_before_ns - n.link_after_ns), el("span", { class: "sub" }, `of ${time(n.link_before_ns)}`)] },
    { head: "Error, at most", number: true, value: (n) => n.bound, show: (n) => share(n.bound) },
    ...(measured ? [
      { head: "Measured last", number: true, value: (n) => n.measured || 0, show: (n) => (n.measured === null ? "" : error(n, n.measured)) },
      { head: "Largest measured", number: true, value: (n) => n.largest, show: (n) => (n.measured === null ? "" : [error(n, n.largest), el("span", { class: "sub" }, `of ${n.runs} runs`)]) },
    ] : []),
  ], rows, { sortBy: 4, descending: true }) : empty("Nothing was sent in a narrower type."));
};

const passes = (g) => {
  const longest = Math.max(1, ...g.report.passes.map((p) => p.duration_ns));
  fill("passes", g.report.passes.length ? sortable([
    { head: "Pass", value: (p) => p.name },
    { head: "Time", number: true, value: (p) => p.duration_ns, show: (p) => time(p.duration_ns) },
    { head: "", value: (p) => p.duration_ns, show: (p) => { const bar = el("div", { class: "bar" }); bar.style.width = (180 * p.duration_ns) / longest + "px"; return bar; } },
    { head: "Result", value: (p) => p.rolled_back || (p.changed ? "changed" : "unchanged"),
      show: (p) => [p.rolled_back ? "rolled back: " + p.rolled_back : p.changed ? "changed the graph" : "no change", p.detail ? el("span", { class: "sub" }, p.detail) : null] },
    { head: "Findings", number: true, value: (p) => p.findings.length, show: (p) => (p.findings.length ? p.findings.map((f) => el("span", { class: "sub" }, `${f.rule}: ${f.message}${f.parameters && f.parameters.length ? ` (${f.parameters.join(", ")})` : ""}`)) : "") },
  ], g.report.passes) : empty("No passes ran."), g.failures.map((f) => el("details", {},
    el("summary", {}, `Graph that ${f.pass && f.pass.name} was rolled back from`), el("pre", { tabindex: 0 }, (f.graph || []).join("\n")))));
};

const ranks = (g) => {
  const agree = g.agreeing.length === 1 ? `Rank ${g.agreeing[0]} is the only one with this plan.`
    : `${g.agreeing.length} ranks have the same plan: ${ranksText(g.agreeing)}.`;
  fill("ranks", el("p", {}, agree), g.differences.length ? sortable([
    { head: "Rank", number: true, value: (d) => d[0] }, { head: "First difference", value: (d) => d[1] },
  ], g.differences) : null);
};

const config = (g) => {
  const rows = Object.entries(g.report.config);
  fill("config", rows.length ? sortable([
    { head: "Setting", value: (r) => r[0] }, { head: "Value", value: (r) => (r[1] === null ? "none" : String(r[1])) },
  ], rows) : empty("Not recorded."), el("p", { class: "hint" },
    `torch ${g.report.torch_version || "?"}, world size ${g.report.world_size}, ${g.report.nodes} nodes`));
};

// ---- timeline ----------------------------------------------------------------------------------------------------
const ROW = 22, GAP = 6, AXIS = 18, MEMORY = 70, LEFT = 92;
const span = { begin: 0, end: 1, limit: 1 };
const COLORS = ["compute", "wait", "issue", "transfer"];

const decode = (raw) => {
  const rows = new Map(raw.threads.map(([thread, name]) => [thread, { name, first: 0, last: 0 }]));
  const s = raw.slices, count = s.length / 6;
  let end = 0;
  for (let k = 0, from = 0; k <= count; k++) {
    if (k < count) end = Math.max(end, s[6 * k + 2] + s[6 * k + 3]);
    if (k === count || (k && s[6 * k] !== s[6 * (k - 1)])) {
      if (k) { const row = rows.get(s[6 * (k - 1)]); if (row) { row.first = from; row.last = k; } }
      from = k;
    }
  }
  return { s, strings: raw.strings, memory: raw.memory, rows: [...rows.values()], end };
};

const timelinesOf = (index) => data.graphs[index].timelines.map((when) => {
  const raw = byId(`timeline-${index}-${when}`);
  return { when, line: decode(JSON.parse(raw.textContent)) };
});

const firstAtOrAfter = (low, high, test) => {
  while (low < high) { const middle = (low + high) >> 1; if (test(middle)) high = middle; else low = middle + 1; }
  return low;
};

const buildTimelines = (index) => {
  views = timelinesOf(index).map(({ when, line }) => {
    const height = AXIS + line.rows.length * (ROW + GAP) + MEMORY + 8;
    const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `Timeline ${when}: ${line.rows.map((r) => r.name).join(", ")}, memory. Arrow keys move, plus and minus zoom.` });
    canvas.style.height = height + "px";
    const view = { when, line, canvas, height };
    listen(view);
    return view;
  });
  span.begin = 0;
  span.limit = span.end = Math.max(1, ...views.map((v) => v.line.end));
  fill("timelines", views.length ? views.flatMap((v) => [el("h3", {}, v.when === "before" ? "Before (order of the input graph)" : "After (order that was compiled)"), v.canvas])
    : empty("This trace holds no timeline for this graph."));
  fill("legend", views.length ? [["compute", "kernel"], ["wait", "wait: the compute lane stands still"], ["issue", "issue"], ["transfer", "transfer"], ["memory", "memory"]].map(([color, text]) => {
    const box = el("i"); box.style.background = `var(--${color})`; return el("span", {}, box, text);
  }) : []);
  paint();
};

const limitSpan = () => {
  const width = Math.min(span.limit, Math.max(20, span.end - span.begin));
  span.begin = Math.min(Math.max(0, span.begin), span.limit - width);
  span.end = span.begin + width;
};
const zoom = (factor, at) => {
  const width = (span.end - span.begin) * factor;
  span.begin = at - ((at - span.begin) / (span.end - span.begin)) * width;
  span.end = span.begin + width;
  limitSpan(); paint();
};
const move = (part) => { const d = (span.end - span.begin) * part; span.begin += d; span.end += d; limitSpan(); paint(); };

let scheduled = false;
const paint = () => {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; for (const view of views) draw(view); });
};

const tick = (range) => {
  const raw = range / 8, power = 10 ** Math.floor(Math.log10(raw));
  for (const m of [1, 2, 5]) if (m * power >= raw) return m * power;
  return 10 * power;
};

const draw = (view) => {
  const { canvas, line } = view, ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 800;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(view.height * ratio);
  const c = canvas.getContext("2d"), css = getComputedStyle(root);
  const color = (name) => css.getPropertyValue("--" + name).trim();
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, view.height);
  c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
  const scale = (width - LEFT) / (span.end - span.begin), x = (ns) => LEFT + (ns - span.begin) * scale;
  const step = tick(span.end - span.begin);
  for (let t = Math.ceil(span.begin / step) * step; t <= span.end; t += step) {
    c.fillStyle = color("line"); c.fillRect(x(t), AXIS, 1, view.height - AXIS);
    c.fillStyle = color("soft"); c.fillText(time(t), x(t) + 3, AXIS / 2);
  }
  const paints = COLORS.map(color), on = color("on"), s = line.s;
  line.rows.forEach((row, r) => {
    const y = AXIS + r * (ROW + GAP) + GAP;
    // Slices of a row do not overlap, so their ends are sorted like their begins.
    let k = firstAtOrAfter(row.first, row.last, (m) => s[6 * m + 2] + s[6 * m + 3] >= span.begin);
    // Slices narrower than a pixel add up in their pixel's column, which shows each category's share of the time.
    const shares = new Map();
    for (; k < row.last && s[6 * k + 2] <= span.end; k++) {
      const length = s[6 * k + 3];
      if (length === 0) continue;
      const begin = Math.max(LEFT, x(s[6 * k + 2])), end = Math.min(width, x(s[6 * k + 2] + length)), w = end - begin;
      if (w < 1.5) {
        const column = Math.floor(begin);
        let share = shares.get(column);
        if (!share) shares.set(column, (share = [0, 0, 0, 0]));
        share[s[6 * k + 1]] += Math.max(0, w);
        continue;
      }
      c.fillStyle = paints[s[6 * k + 1]]; c.fillRect(begin, y, w - (w > 3 ? 0.6 : 0), ROW);
      if (w > 26) {
        const name = line.strings[s[6 * k + 4]], room = Math.floor((w - 6) / 6);
        c.fillStyle = on; c.fillText(name.length > room ? name.slice(0, Math.max(1, room - 1)) + "…" : name, begin + 4, y + ROW / 2);
      }
    }
    for (const [column, share] of shares) {
      const total = Math.max(1, share[0] + share[1] + share[2] + share[3]);
      let bottom = y + ROW;
      for (const category of [0, 3, 2, 1]) {
        const height = (ROW * share[category]) / total;
        if (height) { c.fillStyle = paints[category]; c.fillRect(column, bottom - height, 1, height); bottom -= height; }
      }
    }
    c.fillStyle = color("panel"); c.fillRect(0, y, LEFT - 2, ROW);
    c.fillStyle = color("text"); c.fillText(row.name.length > 14 ? row.name.slice(0, 13) + "…" : row.name, 6, y + ROW / 2);
  });
  drawMemory(c, view, x, width, color);
};

const drawMemory = (c, view, x, width, color) => {
  const m = view.line.memory, count = m.length / 2, top = view.height - MEMORY - 2, bottom = view.height - 6;
  const s = lastSchedule(data.graphs[current].report), budget = s ? s.budget_bytes : null;
  let high = budget || 0;
  for (const v of views) for (let k = 1; k < v.line.memory.length; k += 2) high = Math.max(high, v.line.memory[k]);
  high = Math.max(1, high) * 1.08;
  const y = (bytes) => bottom - (bytes / high) * (bottom - top);
  if (count) {
    c.fillStyle = color("memory"); c.globalAlpha = 0.55; c.beginPath(); c.moveTo(LEFT, bottom);
    let k = Math.max(0, firstAtOrAfter(0, count, (i) => m[2 * i] > span.begin) - 1), px = -1, peak = 0, level = 0;
    for (; k < count && m[2 * k] <= span.end; k++) {
      const at = Math.max(LEFT, x(m[2 * k]));
      level = m[2 * k + 1];
      if (Math.floor(at) === px) { peak = Math.max(peak, level); continue; }
      if (px >= 0) { c.lineTo(px, y(peak)); c.lineTo(at, y(m[2 * (k - 1) + 1])); }
      px = Math.floor(at); peak = level;
    }
    c.lineTo(px, y(peak));
    const stop = Math.min(width, x(Math.min(view.line.end, span.end)));
    c.lineTo(stop, y(level)); c.lineTo(stop, bottom); c.closePath(); c.fill(); c.globalAlpha = 1;
  }
  if (budget !== null) {
    c.strokeStyle = color("bad"); c.setLineDash([5, 4]); c.beginPath(); c.moveTo(LEFT, y(budget)); c.lineTo(width, y(budget)); c.stroke(); c.setLineDash([]);
  }
  c.fillStyle = color("panel"); c.fillRect(0, top, LEFT - 2, bottom - top);
  c.fillStyle = color("text"); c.fillText("memory", 6, top + 10);
  c.fillStyle = color("soft"); c.fillText("to " + size(high / 1.08), 6, top + 25);
  if (budget !== null) { c.fillStyle = color("bad"); c.fillText("- - budget", 6, top + 40); }
};

const sliceAt = (view, px, py) => {
  const r = Math.floor((py - AXIS - GAP / 2) / (ROW + GAP)), row = view.line.rows[r], s = view.line.s;
  if (!row || px < LEFT) return -1;
  const perPixel = (span.end - span.begin) / (view.canvas.clientWidth - LEFT), ns = span.begin + (px - LEFT) * perPixel;
  const k = firstAtOrAfter(row.first, row.last, (m) => s[6 * m + 2] + s[6 * m + 3] >= ns - perPixel);
  return k < row.last && s[6 * k + 2] <= ns + perPixel ? k : -1;
};
const describe = (view, k) => {
  const s = view.line.s, source = view.line.strings[s[6 * k + 5]], kind = data.categories[s[6 * k + 1]];
  const name = view.line.strings[s[6 * k + 4]];
  const lines = [`${name} (${kind})`, `${time(s[6 * k + 3])} from ${time(s[6 * k + 2])}`];
  if (source) lines.push(source);
  const verdict = data.graphs[current].report.collectives.find((c) => name === c.label || name.endsWith(" " + c.label));
  if (verdict && view.when === "after") lines.push(`${size(verdict.size_bytes)} on ${verdict.lane}: ${verdict.reason}`, verdict.detail, verdict.setting, ...(verdict.parameters || []).map(parameterText));
  return lines.filter(Boolean).join("\n");
};
const memoryAt = (view, ns) => {
  const m = view.line.memory, k = firstAtOrAfter(0, m.length / 2, (i) => m[2 * i] > ns) - 1;
  return k >= 0 ? m[2 * k + 1] : 0;
};

const tip = byId("tip");
const listen = (view) => {
  const { canvas } = view;
  const nsAt = (px) => span.begin + ((px - LEFT) / (canvas.clientWidth - LEFT)) * (span.end - span.begin);
  let grabbed = null;
  canvas.addEventListener("pointerdown", (e) => { grabbed = { x: e.offsetX, begin: span.begin, end: span.end }; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { grabbed = null; });
  canvas.addEventListener("pointermove", (e) => {
    if (grabbed) {
      const d = ((grabbed.x - e.offsetX) / (canvas.clientWidth - LEFT)) * (grabbed.end - grabbed.begin);
      span.begin = grabbed.begin + d; span.end = grabbed.end + d; limitSpan(); paint();
      return;
    }
    const k = sliceAt(view, e.offsetX, e.offsetY);
    const inMemory = e.offsetX > LEFT && e.offsetY > view.height - MEMORY;
    if (k < 0 && !inMemory) { tip.hidden = true; return; }
    tip.textContent = k >= 0 ? describe(view, k) : `${size(memoryAt(view, nsAt(e.offsetX)))} at ${time(nsAt(e.offsetX))}`;
    tip.hidden = false;
    tip.style.left = Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(e.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) move(e.deltaX / canvas.clientWidth);
    else zoom(e.deltaY > 0 ? 1.2 : 1 / 1.2, nsAt(Math.max(LEFT, e.offsetX)));
  }, { passive: false });
  canvas.addEventListener("keydown", (e) => {
    const middle = (span.begin + span.end) / 2;
    const actions = {
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle),
      "-": () => zoom(1 / 0.7, middle), 0: () => { span.begin = 0; span.end = span.limit; paint(); }, Home: () => { span.begin = 0; span.end = span.limit; paint(); },
      n: () => nextWait(view, 1), p: () => nextWait(view, -1),
    };
    if (actions[e.key] && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); actions[e.key](); }
  });
};

const show = (view, k) => {
  const s = view.line.s, begin = s[6 * k + 2], length = s[6 * k + 3], room = Math.max(length * 3, span.limit / 400);
  span.begin = begin + length / 2 - room; span.end = begin + length / 2 + room;
  limitSpan(); paint();
  byId("picked").textContent = `${view.when}: ` + describe(view, k).replaceAll("\n", ", ");
};
const nextWait = (view, direction) => {
  const row = view.line.rows[0], s = view.line.s, middle = (span.begin + span.end) / 2;
  if (!row) return;
  const stalls = [];
  for (let k = row.first; k < row.last; k++) if (s[6 * k + 1] === 1 && s[6 * k + 3] > 0) stalls.push(k);
  const at = (k) => s[6 * k + 2] + s[6 * k + 3] / 2;
  const next = direction > 0 ? stalls.find((k) => at(k) > middle + 1) : stalls.reverse().find((k) => at(k) < middle - 1);
  if (next !== undefined) show(view, next);
};
const zoomTo = (collective) => {
  const view = views.find((v) => v.when === "after") || views[0];
  if (!view) return;
  const s = view.line.s;
  for (let k = 0; k < s.length / 6; k++)
    if (data.categories[s[6 * k + 1]] === "transfer" && view.line.strings[s[6 * k + 4]] === collective.label) { show(view, k); break; }
  view.canvas.scrollIntoView({ block: "center" });
  view.canvas.focus({ preventScroll: true });
};

// ---- start -------------------------------------------------------------------------------------------------------
const select = (index) => {
  current = index;
  byId("graph").value = String(index);
  overview();
  const g = data.graphs[index];
  for (const section of [summary, help, collectives, narrowed, redistributions, asyncTp, decisions, passes, ranks, config]) section(g);
  buildTimelines(index);
};
fill("notes", data.notes.map((note) => el("p", { class: "hint" }, "Note: " + note)));
fill("graph", data.graphs.map((g, k) => el("option", { value: k }, g.title)));
byId("graph").addEventListener("change", (e) => select(Number(e.target.value)));
new ResizeObserver(() => paint()).observe(byId("timelines"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
if (data.graphs.length) select(0); else overview();
root.dataset.ready = "yes";
})();
