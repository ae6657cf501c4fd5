const inflate = async data => {
  const raw = Uint8Array.from(atob(data), c => c.charCodeAt(0));
  return new Uint8Array(await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
};
const BYTES = (() => {
  const plain = [...Array(256).keys()].filter(b => b > 32 && b < 127 || b > 160 && b != 173);
  const map = Array(256);
  let next = 256;
  for (let b = 0; b < 256; b++) map[b] = String.fromCodePoint(plain.includes(b) ? b : next++);
  return map;
})();
const BYTE_OF = new Map(BYTES.map((c, b) => [c, b]));
const pieces = (text, regex, behavior, invert) => {
  const found = [];
  let at = 0;
  for (const m of text.matchAll(regex)) {
    if (!m[0]) continue;
    if (m.index > at) found.push([text.slice(at, m.index), invert]);
    found.push([m[0], !invert]);
    at = m.index + m[0].length;
  }
  if (at < text.length) found.push([text.slice(at), invert]);
  if (behavior == "Removed") return found.filter(p => !p[1]).map(p => p[0]);
  const out = [];
  let before = null;
  if (behavior == "MergedWithNext") {
    for (const [words, isMatch] of found.reverse()) {
      if (isMatch && before === false) out[out.length - 1] = words + out[out.length - 1]; else out.push(words);
      before = isMatch;
    }
    return out.reverse();
  }
  for (const [words, isMatch] of found) {
    const joins = behavior == "MergedWithPrevious" ? isMatch && before === false : behavior == "Contiguous" && isMatch === before;
    if (joins) out[out.length - 1] += words; else out.push(words);
    before = isMatch;
  }
  return out;
};
const readTokenizer = async spec => {
  const tokens = JSON.parse(new TextDecoder().decode(await inflate(spec.tokens))), raw = await inflate(spec.merges);
  const ids = new Map(), ranks = new Map();
  tokens.forEach((token, i) => { if (token !== null) ids.set(token, i); });
  let at = 0, made = 0;
  const number = () => {
    let value = 0, shift = 1, byte;
    do { byte = raw[at++]; value += (byte & 127) * shift; shift *= 128; } while (byte & 128);
    return value;
  };
  for (let rank = 0; at < raw.length; rank++) {
    const n = number();
    made += n % 2 ? -(n + 1) / 2 : n / 2;
    const size = number(), token = tokens[made], pair = token.slice(0, size) + "\0" + token.slice(size);
    if (!ranks.has(pair)) ranks.set(pair, rank);
  }
  const added = new Map();
  for (const row of spec.added) added.set(row[1][0], [...added.get(row[1][0]) || [], row].sort((a, b) => b[1].length - a[1].length));
  const compiled = new Map();
  const regex = source => compiled.get(source) || compiled.set(source, new RegExp(source, "gu")).get(source);
  const normalize = text => spec.normalizer.reduce((t, [kind, a, b]) => kind == "form" ? t.normalize(a)
    : kind == "prepend" ? t && a + t : t.replace(regex(a), () => b), text);
  const split = (text, isFirst) => spec.splits.reduce((words, [kind, a, b, c]) => words.flatMap((word, i) => {
    if (kind == "split") return pieces(word, regex(a), b, c);
    if (kind == "prefix") return word.startsWith(a) ? word : a + word;
    if (kind == "bytes") return [...new TextEncoder().encode(word)].map(byte => BYTES[byte]).join("");
    word = word.replaceAll(" ", a);
    if (!word.startsWith(a) && (b == "always" || b == "first" && isFirst && i == 0)) word = a + word;
    return c ? pieces(word, regex("\\u{" + a.codePointAt(0).toString(16) + "}"), "MergedWithNext", false) : word;
  }), text ? [text] : []);
  const merge = word => {
    if (spec.whole && ids.has(word)) return [ids.get(word)];
    const parts = [];
    for (const c of word) {
      if (ids.has(c)) { parts.push(c); continue; }
      const bytes = [...new TextEncoder().encode(c)].map(b => "<0x" + b.toString(16).toUpperCase().padStart(2, "0") + ">");
      if (spec.bytes && bytes.every(b => ids.has(b))) parts.push(...bytes);
      else if (spec.unknown >= 0 && !(spec.fuse && parts.at(-1) === null)) parts.push(null);
    }
    for (;;) {
      let best = -1, least = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = parts[i] === null || parts[i + 1] === null ? undefined : ranks.get(parts[i] + "\0" + parts[i + 1]);
        if (rank < least) { least = rank; best = i; }
      }
      if (best < 0) return parts.map(part => part === null ? spec.unknown : ids.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
  };
  const encode = text => {
    const out = [];
    const plain = (words, isFirst) => { for (const word of split(normalize(words), isFirst)) out.push(...merge(word)); };
    let start = 0;
    for (let i = 0; i < text.length;) {
      const row = (added.get(text[i]) || []).find(r => text.startsWith(r[1], i));
      if (!row) { i++; continue; }
      const before = text.slice(start, i);
      plain(row[2] ? before.replace(/\p{White_Space}+$/u, "") : before, start == 0);
      out.push(row[0]);
      i += row[1].length;
      if (row[3]) i += text.slice(i).match(/^\p{White_Space}*/u)[0].length;
      start = i;
    }
    plain(text.slice(start), start == 0);
    return out;
  };
  const isByteLevel = spec.splits.some(step => step[0] == "bytes"), own = new Set(spec.added.map(row => row[0]));
  const bytesOf = id => {
    const token = tokens[id] ?? "";
    if (own.has(id)) return new TextEncoder().encode(token);
    if (isByteLevel) return Uint8Array.from([...token], c => BYTE_OF.get(c) ?? 63);
    const byte = /^<0x([0-9A-F]{2})>$/.exec(token);
    return byte ? Uint8Array.of(parseInt(byte[1], 16)) : new TextEncoder().encode(token.replaceAll("\u2581", " "));
  };
  return {encode, bytesOf};
};
for (const box of document.querySelectorAll(".explorer")) {
  const field = box.querySelector("textarea"), said = box.querySelector("output"), shown = box.querySelector(".tokens");
  let loaded = null;
  const show = async () => {
    loaded = loaded || readTokenizer(JSON.parse(box.dataset.spec));
    let tokenizer;
    try { tokenizer = await loaded; } catch { said.textContent = "This browser cannot unpack the vocabulary."; return; }
    const text = field.value, ids = tokenizer.encode(text), size = new TextEncoder().encode(text).length;
    said.textContent = ids.length.toLocaleString("en") + " tokens, " + [...text].length.toLocaleString("en") + " characters, "
      + (ids.length ? (size / ids.length).toFixed(2) : "0") + " bytes per token";
    shown.replaceChildren(...ids.map((id, i) => {
      const span = document.createElement("span"), bytes = tokenizer.bytesOf(id);
      let words;
      try { words = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}).decode(bytes); }
      catch { words = [...bytes].map(b => "\\x" + b.toString(16).padStart(2, "0")).join(""); }
      span.className = "t" + i % 4;
      span.title = span.dataset.id = id;
      span.textContent = words.replaceAll("\n", "\u21b5\n").replaceAll(" ", "\u00b7");
      return span;
    }));
  };
  said.setAttribute("aria-live", "polite");
  field.addEventListener("input", show);
  field.closest("details")?.addEventListener("toggle", show, {once: true});
  if (!field.closest("details:not([open])")) show();
}
for (const box of document.querySelectorAll(".memory")) {
  const d = JSON.parse(box.dataset.memory), slide = box.querySelector("input"), kind = box.querySelector("select");
  const said = box.querySelector("output"), size = n => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (n >= 1024 && i < 4) { n /= 1024; i++; }
    return n.toPrecision(3) + " " + units[i];
  };
  const show = () => {
    const context = Math.round(d.least * (d.most / d.least) ** (slide.value / 1000) / 64) * 64 || 64;
    const at = Math.min(context, d.most);
    const cache = d.layers.reduce((sum, [values, window, n]) => sum + n * values * Math.min(at, window || at), 0) * d.types[kind.value];
    said.textContent = at.toLocaleString("en") + " tokens: " + size(d.weights + cache) + " (weights " + size(d.weights)
      + ", KV cache " + size(cache) + ")";
    slide.ariaValueText = said.textContent;
  };
  said.setAttribute("aria-live", "polite");
  slide.addEventListener("input", show);
  kind.addEventListener("input", show);
  show();
}
