const short = (v, units) => {
  for (const [limit, unit] of units) if (Math.abs(v) >= limit) return +(v / limit).toPrecision(4) + unit;
  return String(+v.toPrecision(4));
};
const put = (v, k) => v == null ? "–" : k == "percent" ? (100 * v).toFixed(1) + " %"
  : k == "count" ? short(v, [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " K"]])
  : short(v, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
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
      said.textContent = d.x + " " + put(x, d.xk) + "   " + d.s.map(s => s.n + " " + put(s.y[near(s, x)], d.k)).join("   ");
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
  for (const t of root.querySelectorAll("table.sortable")) {
    const [head, ...rows] = t.rows, value = (row, i) => row.cells[i].textContent.trim(), body = rows[0].parentNode;
    const number = v => /^[-−]?[\d.,]+(e[-+]?\d+)?( [%\w]+)?$/i.test(v) ? parseFloat(v.replaceAll(",", "").replace("−", "-")) : NaN;
    const scale = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40};
    const unit = v => scale[v.split(" ")[1]] || 1;
    [...head.cells].forEach((cell, i) => {
      cell.tabIndex = 0;
      const sort = () => {
        const up = cell.ariaSort == "descending", sign = up ? 1 : -1;
        for (const other of head.cells) other.ariaSort = "none";
        cell.ariaSort = up ? "ascending" : "descending";
        const worst = v => v == "–" ? -Infinity : v == "∞" ? Infinity : number(v) * unit(v);
        const all = body.rows ? [...body.rows] : rows;
        all.sort((p, q) => {
          const a = value(p, i), b = value(q, i), m = worst(a), n = worst(b);
          return sign * (isNaN(m) || isNaN(n) ? a.localeCompare(b) : m < n ? -1 : m > n ? 1 : 0);
        });
        body.append(...all);
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", e => { if (e.key == "Enter" || e.key == " ") { e.preventDefault(); sort(); } });
    });
  }
  for (const s of root.querySelectorAll(".search")) {
    const input = s.querySelector("input"), said = s.querySelector("output"), before = said.textContent;
    const body = s.nextElementSibling.querySelector("tbody"), MOST = 200;
    const titles = [...body.rows[0].cells].map(cell => cell.dataset.title);
    const [kinds, more] = s.dataset.more ? JSON.parse(s.dataset.more) : [[], []];
    let added = [];
    said.setAttribute("aria-live", "polite");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = text => words.every(word => text.toLowerCase().includes(word));
      added.forEach(row => row.remove());
      let n = 0;
      for (const row of body.rows) n += !(row.hidden = !fits([...row.cells].filter(cell => cell.className != "n").map(cell => cell.textContent).join(" ")));
      const found = words.length ? more.filter(cells => fits(cells.filter((cell, i) => kinds[i] != "n").join(" "))) : [];
      added = found.slice(0, MOST).map(cells => {
        const row = document.createElement("tr");
        cells.forEach((words, i) => { const cell = row.insertCell(); cell.textContent = words; if (kinds[i]) cell.className = kinds[i];
          if (titles[i]) cell.dataset.title = titles[i]; });
        return row;
      });
      body.append(...added);
      const rest = found.length > MOST ? ", the first " + (n + MOST).toLocaleString("en") + " shown" : "";
      said.textContent = words.length ? (n + found.length).toLocaleString("en") + " found" + rest : before;
    });
  }
};
bind(document);
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const d of closed) d.open = true;
});
addEventListener("afterprint", () => { for (const d of closed) d.open = false; });
