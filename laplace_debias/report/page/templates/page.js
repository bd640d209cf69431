"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");

  // Light and dark. Where the browser keeps nothing, the choice lasts as long as the page.
  const kept = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
                 set: (theme) => { try { localStorage.setItem("theme", theme); } catch { /* not kept */ } } };
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  if (["light", "dark"].includes(kept.get())) root.dataset.theme = kept.get();
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (systemIsDark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    kept.set(root.dataset.theme);
  });

  // Methods on and off, in every picture.
  const off = new Set();
  for (const box of document.querySelectorAll("[data-toggles]")) {
    const show = () => {
      const key = box.dataset.toggles;
      if (box.checked) off.delete(key); else off.add(key);
      for (const part of document.querySelectorAll(`[data-method="${CSS.escape(key)}"]`))
        part.classList.toggle("off", !box.checked);
    };
    box.addEventListener("change", show);
    show(); // a browser that comes back to the page keeps the boxes as they were
  }

  // Values: at the pointer, or step by step with the arrow keys.
  for (const data of document.querySelectorAll("figure > script[type='application/json']")) {
    const points = JSON.parse(data.textContent);
    const picture = data.parentElement.querySelector(".picture");
    const svg = picture.querySelector("svg");
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("role", "status");
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("r", "5");
    ring.setAttribute("class", "looked off");
    svg.append(ring);
    picture.append(tip);
    let current = -1;

    const hide = () => { tip.textContent = ""; ring.classList.add("off"); };
    const show = (index) => {
      current = index;
      const [x, y, , text] = points[index];
      ring.setAttribute("cx", x);
      ring.setAttribute("cy", y);
      ring.classList.remove("off");
      tip.textContent = text;
      const scale = svg.clientWidth / width;
      const room = picture.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, x * scale - tip.offsetWidth / 2))}px`;
      const above = y * scale - tip.offsetHeight - 12;
      tip.style.top = `${above > -20 ? above : y * scale + 12}px`;
    };
    const visible = () => points.map((_, index) => index).filter((index) => !off.has(points[index][2]));

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * width / box.width;
      const y = (event.clientY - box.top) * height / box.height;
      let nearest = -1, least = 30 ** 2;
      for (const index of visible()) {
        const distance = (points[index][0] - x) ** 2 + (points[index][1] - y) ** 2;
        if (distance < least) { least = distance; nearest = index; }
      }
      if (nearest < 0) hide(); else show(nearest);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      const order = visible();
      if (!step || !order.length) return;
      event.preventDefault();
      const at = order.indexOf(current);
      show(order[at < 0 ? 0 : (at + step + order.length) % order.length]);
    });
  }

  // Tables say where they scroll.
  const sideways = new ResizeObserver((seen) => {
    for (const { target } of seen)
      target.previousElementSibling.classList.toggle("off", target.scrollWidth <= target.clientWidth);
  });
  for (const region of document.querySelectorAll(".sideways + .scroll")) sideways.observe(region);

  // Printed, everything is unfolded.
  const folded = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...folded()]; for (const one of opened) one.open = true; });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
})();
