"use strict";
// A round that ended reloads the page, with the same parts unfolded.
(function () {
  var shown = document.getElementById("live");
  var folds = Array.prototype.slice.call(document.querySelectorAll("details.section"));
  function title(fold) { return fold.querySelector("h2").id; }
  var open = (sessionStorage.getItem("open") || "").split(" ");
  folds.forEach(function (fold) { if (open.indexOf(title(fold)) >= 0) { fold.open = true; } });
  function look() {
    fetch("state.json", {cache: "no-store"}).then(function (answer) {
      return answer.json();
    }).then(function (state) {
      if (state.changes === shown.getAttribute("data-changes")) { setTimeout(look, 2000); return; }
      var unfolded = folds.filter(function (fold) { return fold.open; });
      sessionStorage.setItem("open", unfolded.map(title).join(" "));
      location.reload();
    }).catch(function () { shown.textContent = "The watch ended: this page stays as it is."; });
  }
  setTimeout(look, 2000);
}());
