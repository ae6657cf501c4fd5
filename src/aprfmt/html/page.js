const short = (v, units) => {
  for (const [limit, unit] of units) if (Math.abs(v) >= limit) return +(v / limit).toPrecision(4) + unit;
  return String(+v.toPrecision(4));
};
const put = (v, k) => v == null ? "–" : k == "percent" ? (100 * v).toFixed(1) + " %"
  : k == "count" ? short(v, [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " K"]])
  : short(v, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
const number = v => /^[-−]?[\d.,]+(e[-+]?\d+)?( [%\w]+)?$/i.test(v) ? parseFloat(v.replaceAll(",", "").replace("−", "-")) : NaN;
const UNITS = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40};
const worth = v => v == "–" ? -Infinity : v == "∞" ? Infinity : number(v) * (UNITS[v.split(" ")[1]] || 1);
// The rows of a table: sorted by a title, filtered by the box before it, as many shown as were before.
const rowsOf = t => {
  const [head, ...first] = t.rows, body = first[0].parentNode, box = t.closest?.(".card")?.previousElementSibling;
  const s = box?.matches(".search") ? box : null, [kinds, more] = s?.dataset.more ? JSON.parse(s.dataset.more) : [[], []];
  const all = [...first.map(row => ({row, words: [...row.cells].map(cell => cell.textContent.trim())})), ...more.map(words => ({words}))];
  const titles = [...head.cells].map(cell => cell.textContent), stacks = first[0].cells[0].dataset?.title !== undefined;
  const said = s?.querySelector("output"), before = said?.textContent, MOST = 200;
  let query = [], order = null, most = first.length;
  const made = record => {
    if (record.row) return record.row;
    record.row = document.createElement("tr");
    record.words.forEach((words, i) => {
      const cell = record.row.insertCell();
      cell.textContent = words;
      if (kinds[i]) cell.className = kinds[i];
      if (stacks) cell.dataset.title = titles[i];
    });
    return record.row;
  };
  const isNumber = i => kinds[i] == "n" || first[0].cells[i].className == "n";
  const button = more.length ? document.createElement("button") : null;
  const show = () => {
    let found = all;
    if (query.length) found = all.filter(r => {
      const text = r.words.filter((words, i) => !isNumber(i)).join(" ").toLowerCase();
      return query.every(word => text.includes(word));
    });
    if (order) found = [...found].sort((p, q) => {
      const [i, sign] = order, a = p.words[i], b = q.words[i], m = worth(a), n = worth(b);
      return sign * (isNaN(m) || isNaN(n) ? a.localeCompare(b) : m < n ? -1 : m > n ? 1 : 0);
    });
    const limit = query.length ? Math.max(most, MOST) : most;
    body.replaceChildren(...found.slice(0, limit).map(made));
    if (button) { button.hidden = found.length <= limit; button.textContent = "Show " + Math.min(MOST, found.length - limit) + " more"; }
    if (said) said.textContent = query.length ? found.length.toLocaleString("en") + " found"
      + (found.length > limit ? ", the first " + limit.toLocaleString("en") + " shown" : "")
      : most > first.length ? Math.min(most, all.length).toLocaleString("en") + " of " + all.length.toLocaleString("en") + " shown" : before;
  };
  if (s) {
    said.setAttribute("aria-live", "polite");
    s.querySelector("input").addEventListener("input", e => {
      query = e.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      show();
    });
  }
  if (button) {
    button.className = "more";
    button.type = "button";
    button.addEventListener("click", () => { most += MOST; show(); });
    t.closest(".card").after(button);
    show();
  }
  if (t.classList.contains("sortable")) [...head.cells].forEach((cell, i) => {
    cell.tabIndex = 0;
    const sort = () => {
      const up = cell.ariaSort == "descending";
      for (const other of head.cells) other.ariaSort = "none";
      cell.ariaSort = up ? "ascending" : "descending";
      order = [i, up ? 1 : -1];
      show();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", e => { if (e.key == "Enter" || e.key == " ") { e.preventDefault(); sort(); } });
  });
};
const bind = root => {
  for (const f of root.querySelectorAll("figure[data-chart]")) {
    const d = JSON.parse(f.dataset.chart), svg = f.querySelector("svg"), first = d.s[0];
    const line = f.querySelector(".cursor"), said = f.querySelector("output");
    const near = (s, x) => s.x.reduce((a, v, i) => Math.abs(v - x) < Math.abs(s.x[a] - x) ? i : a, 0);
    let at = -1;
    const show = i => {
      at = Math.max(0, Math.min(first.x.length - 1, i));
      const x = first.x[at], p = d.l + (x - d.lo) / ((d.hi - d.lo) || 1) * (d.r - d.l);
      line.setAttribute("x1", p); line.setAttribute("x2", p); line.setAttribute("visibility", "visible");
      said.textContent = d.x + " " + put(x, d.xk) + "   " + d.s.map(s => {
      const i = near(s, x);
      return (s.t ? s.t[i] : s.n) + " " + put(s.y[i], d.k);
    }).join("   ");
    };
    const hide = () => { line.setAttribute("visibility", "hidden"); said.textContent = ""; };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", e => {
      const b = svg.getBoundingClientRect(), u = (e.clientX - b.left) / b.width * d.w;
      show(near(first, d.lo + (u - d.l) / (d.r - d.l) * (d.hi - d.lo)));
    });
    said.setAttribute("aria-live", "polite");
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", e => {
      const many = Math.max(1, Math.round(first.x.length / 20));
      const to = {ArrowRight: at + 1, ArrowLeft: at < 0 ? first.x.length - 1 : at - 1, PageDown: at + many, PageUp: at - many,
        Home: 0, End: first.x.length - 1}[e.key];
      if (to !== undefined) { e.preventDefault(); show(to); } else if (e.key == "Escape") hide();
    });
  }
  for (const f of root.querySelectorAll("figure.map")) {
    const rows = [...f.querySelectorAll("svg")], said = f.querySelector("output");
    let row = 0, at = 0, marked = null;
    said.setAttribute("aria-live", "polite");
    const show = cell => {
      if (marked) marked.classList.remove("at");
      marked = cell;
      if (cell) cell.classList.add("at");
      said.textContent = cell ? cell.textContent || "nothing" : "";
    };
    const move = (to, column) => {
      rows[row].tabIndex = -1;
      row = Math.max(0, Math.min(rows.length - 1, to));
      at = Math.max(0, Math.min(rows[row].children.length - 1, column));
      rows[row].tabIndex = 0;
      rows[row].focus();
      show(rows[row].children[at]);
    };
    rows.forEach((svg, i) => {
      svg.addEventListener("pointermove", e => show(e.target.closest("rect")));
      svg.addEventListener("pointerleave", () => show(null));
      svg.addEventListener("blur", () => show(null));
      svg.addEventListener("keydown", e => {
        const to = {ArrowRight: [i, at + (marked ? 1 : 0)], ArrowLeft: [i, at - 1], ArrowDown: [i + 1, at], ArrowUp: [i - 1, at],
          Home: [i, 0], End: [i, Infinity]}[e.key];
        if (to) { e.preventDefault(); move(...to); }
      });
    });
  }
  for (const t of root.querySelectorAll("table.sortable,.search+.card table")) rowsOf(t);
};
bind(document);
if (globalThis.matchMedia?.("(max-width:600px)").matches) for (const d of document.querySelectorAll("details.wide")) d.open = false;
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const d of closed) d.open = true;
});
addEventListener("afterprint", () => { for (const d of closed) d.open = false; });
