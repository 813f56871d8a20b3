// What folds out is read by its own words, such as "Solution". The theme gives all of them one other name.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll("summary[aria-label]")) summary.removeAttribute("aria-label");
});
