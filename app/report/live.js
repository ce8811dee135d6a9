"use strict";
// Asks for the parts of the page and replaces those that have changed: nothing flickers, and what
// is not replaced keeps its scroll position and selection.
const shown = new Map();
let timer = 0;

function replace(id, html) {
  if (shown.get(id) === html) return;
  shown.set(id, html);
  document.getElementById(id).innerHTML = html;  // Escaped by the program that serves the page.
}

async function refresh() {
  clearTimeout(timer);
  let refreshSec = 2;
  if (!document.hidden) {
    try {
      const reply = await fetch("/live.json", {cache: "no-store"});
      if (!reply.ok) throw new Error(reply.status);
      const live = await reply.json();
      document.title = live.title;
      for (const [id, html] of Object.entries(live.parts)) replace(id, html);
      refreshSec = live.refresh_sec;
      document.getElementById("lost").hidden = true;
    } catch {
      document.getElementById("lost").hidden = false;
    }
  }
  clearTimeout(timer);
  timer = setTimeout(refresh, 1000 * refreshSec);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
timer = setTimeout(refresh, 1000);
