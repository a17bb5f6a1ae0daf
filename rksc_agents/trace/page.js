"use strict";
const boxes = [...document.querySelectorAll(".box")];
const at = (index) => boxes.find((box) => box.dataset.index === index);
const show = () => {
  const branch = location.hash.startsWith("#branch-") && document.getElementById(location.hash.slice(1));
  if (branch) {
    branch.open = true;
    branch.scrollIntoView({ block: "nearest" });
  }
};
const steps = {
  ArrowLeft: (box) => at(box.dataset.parent),
  ArrowRight: (box) => boxes.find((other) => other.dataset.parent === box.dataset.index),
  ArrowUp: (box) => boxes[boxes.indexOf(box) - 1],
  ArrowDown: (box) => boxes[boxes.indexOf(box) + 1],
};
document.querySelector("#tree").addEventListener("keydown", (event) => {
  const box = event.target.closest(".box");
  const next = box && event.key in steps && steps[event.key](box);
  if (next) {
    event.preventDefault();
    next.focus();
  }
});
document.querySelector("#tree").addEventListener("click", () => setTimeout(show));
addEventListener("hashchange", show);
show();
