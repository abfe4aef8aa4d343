"use strict";
(function () {
  var form = document.getElementById("filter");
  if (!form) { return; }
  var figures = Array.prototype.slice.call(document.querySelectorAll("#all figure"));
  var told = document.getElementById("shown");
  function apply() {
    var wanted = Array.prototype.map.call(form.querySelectorAll("select"), function (select) {
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
