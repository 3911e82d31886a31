"use strict";
function copyText(button) {
  const text = button.parentElement.querySelector("code").textContent;
  const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); };
  const select = () => {
    const range = document.createRange();
    range.selectNodeContents(button.parentElement.querySelector("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    if (document.execCommand("copy")) done();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, select); else select();
}
async function recordText() {
  const holder = document.getElementById("record");
  const text = holder.content.textContent;
  if (holder.dataset.encoding === "json") return text;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
async function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await recordText()], {type: "application/json"}));
  link.download = document.getElementById("record").dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function unfold() {
  const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = row && row.closest("details");
  if (fold && !fold.open) { fold.open = true; row.scrollIntoView(); }
}
addEventListener("hashchange", unfold);
unfold();
for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copyText(button));
document.getElementById("download").addEventListener("click", download);
