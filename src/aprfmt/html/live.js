const main = document.querySelector("main"), notice = document.createElement("p");
notice.className = "soft live";
notice.setAttribute("role", "status");
main.before(notice);
let tag = "";
const folds = () => new Set([...main.querySelectorAll("details[open]>summary")].map(s => s.textContent));
const refresh = async () => {
  let state = "";
  try {
    const answer = await fetch("parts", {cache: "no-store", headers: {"If-None-Match": tag}});
    state = answer.headers.get("X-Run-State") || "";
    if (answer.status == 200) {
      const parts = await answer.text(), open = folds(), at = scrollY;
      if (tag) {
        main.innerHTML = parts;
        for (const s of main.querySelectorAll("details>summary")) s.parentNode.open = open.has(s.textContent);
        bind(main);
        scrollTo(0, at);
      }
      tag = answer.headers.get("ETag") || "";
    }
  } catch {
    state = "gone";
  }
  notice.textContent = state == "running" ? "Live: this page follows the run."
    : state == "gone" ? "apr report has ended: this page no longer changes." : "The run has ended: this page is final.";
  if (state == "running") setTimeout(refresh, 2000);
};
refresh();
