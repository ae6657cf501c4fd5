for (const f of document.querySelectorAll("figure[data-chart]")) {
  const d = JSON.parse(f.dataset.chart), svg = f.querySelector("svg");
  const line = f.querySelector(".cursor"), said = f.querySelector("output");
  const put = (v, k) => v == null ? "–" : k == "percent" ? (100 * v).toFixed(1) + " %"
    : Math.abs(v) >= 1e12 ? (v / 1e12).toPrecision(4) + "T" : Math.abs(v) >= 1e9 ? (v / 1e9).toPrecision(4) + "G"
    : Math.abs(v) >= 1e6 ? (v / 1e6).toPrecision(4) + "M" : Math.abs(v) >= 1e4 ? (v / 1e3).toPrecision(4) + "k"
    : String(+v.toPrecision(4));
  const hide = () => { line.setAttribute("visibility", "hidden"); said.textContent = ""; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", e => {
    const b = svg.getBoundingClientRect(), u = (e.clientX - b.left) / b.width * d.w;
    const x = d.lo + (u - d.l) / (d.r - d.l) * (d.hi - d.lo);
    const near = s => s.x.reduce((a, v, i) => Math.abs(v - x) < Math.abs(s.x[a] - x) ? i : a, 0);
    const first = d.s[0], at = first.x[near(first)], p = d.l + (at - d.lo) / ((d.hi - d.lo) || 1) * (d.r - d.l);
    line.setAttribute("x1", p); line.setAttribute("x2", p); line.setAttribute("visibility", "visible");
    said.textContent = d.x + " " + put(at) + "   " + d.s.map(s => s.n + " " + put(s.y[near(s)], d.k)).join("   ");
  });
}
for (const t of document.querySelectorAll("table.sortable")) {
  const [head, ...rows] = t.rows, value = (row, i) => row.cells[i].textContent.trim();
  const number = v => /^[-−]?[\d.,]+(e[-+]?\d+)?( [%\w]+)?$/i.test(v) ? parseFloat(v.replaceAll(",", "").replace("−", "-")) : NaN;
  [...head.cells].forEach((cell, i) => {
    cell.tabIndex = 0;
    const sort = () => {
      const up = cell.ariaSort == "descending", sign = up ? 1 : -1;
      for (const other of head.cells) other.ariaSort = "none";
      cell.ariaSort = up ? "ascending" : "descending";
      const worst = v => v == "–" ? -Infinity : v == "∞" ? Infinity : number(v);
      rows.sort((p, q) => {
        const a = value(p, i), b = value(q, i), m = worst(a), n = worst(b);
        return sign * (isNaN(m) || isNaN(n) ? a.localeCompare(b) : m < n ? -1 : m > n ? 1 : 0);
      });
      head.parentNode.append(...rows);
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", e => { if (e.key == "Enter") sort(); });
  });
}
