"use strict";
(function () {
  function all(selector, within) {
    return Array.prototype.slice.call((within || document).querySelectorAll(selector));
  }
  var sections = all("details.section");

  // A link into what is folded unfolds it; paper shows every section.
  function reveal() {
    var target = document.getElementById(location.hash.slice(1));
    var section = target && target.closest("details.section");
    if (section) { section.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", reveal);
  reveal();
  var before = [];
  addEventListener("beforeprint", function () {
    before = sections.filter(function (section) { return !section.open; });
    before.forEach(function (section) { section.open = true; });
  });
  addEventListener("afterprint", function () {
    before.forEach(function (section) { section.open = false; });
  });

  var search = document.getElementById("search");
  search.addEventListener("submit", function (event) { event.preventDefault(); });
  search.addEventListener("input", function () {
    var wanted = search.querySelector("input").value.trim().toLowerCase();
    var hits = 0;
    sections.forEach(function (section) {
      var fits = section.textContent.toLowerCase().indexOf(wanted) >= 0;
      section.hidden = wanted !== "" && !fits;
      all("details", section).concat(section).forEach(function (each) {
        each.open = wanted !== "" && each.textContent.toLowerCase().indexOf(wanted) >= 0;
      });
      hits += fits ? 1 : 0;
    });
    search.querySelector("output").textContent = wanted && hits + " of " + sections.length + " parts";
  });
  search.hidden = false;

  var form = document.getElementById("filter");
  if (!form) { return; }
  var figures = all("#all figure");
  var told = document.getElementById("shown");
  function apply() {
    var wanted = all("select", form).map(function (select) {
      return [select.name, select.value];
    });
    var shown = 0;
    figures.forEach(function (figure) {
      var fits = wanted.every(function (pair) {
        return pair[1] === "" || figure.getAttribute("data-" + pair[0]) === pair[1];
      });
      figure.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    told.textContent = shown + " of " + figures.length + " shown";
  }
  form.addEventListener("change", apply);
  form.addEventListener("reset", function () { setTimeout(apply, 0); });
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  form.hidden = false;
  apply();
}());
