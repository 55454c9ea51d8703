
"use strict";
/* Filter, sort, deep links, the slider and the restarts. Reads data attributes, writes text and styles, asks nobody. */
(() => {
  const root = document.documentElement, find = (where, what) => where.querySelector(what);
  root.classList.add("scripted");

  // --- pictures: the search and the restarts of one card ---------------------------------------------------------

  const pictured = (card) => (find(card, ".three") || {}).style;  // none where examples are no pictures
  const show = (card, uri, count, place) => {
    const style = pictured(card);
    if (!style) return;
    if (uri) style.setProperty("--found", `url(${uri})`);
    style.setProperty("--count", count);
    style.setProperty("--at", count > 1 ? `${(100 * place) / (count - 1)}%` : "0%");
  };

  const equip = (card) => {
    if (card.equipped) return;
    card.equipped = true;
    const name = card.dataset.name, style = pictured(card), own = style ? style.getPropertyValue("--found").slice(4, -1) : "";
    const steps = (card.dataset.steps || "").split(" ").filter(Boolean).map(Number);
    const curve = (card.dataset.search || "").split(" ").filter(Boolean).map((pair) => pair.split(":").map(Number));
    const buttons = [];
    const pressed = (place) => buttons.forEach((button, at) => button.setAttribute("aria-pressed", at === place));
    // Along the pictures where there are some, else along the curve; the last stop is what the attack returned.
    // An ensemble's curve counts attacks, not steps: then it says nothing about a picture.
    const last = curve.length ? curve[curve.length - 1][0] : -1, along = last + last / Math.max(1, curve.length - 1);
    const same = steps.length > 0 && steps[steps.length - 1] <= along;
    const nearest = (step) => curve.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best), curve[0]);
    const stops = steps.length ? steps.map((step) => [step, same ? nearest(step)[1] : NaN]) : curve.slice(0, -1);
    let slider = null;

    const returned = () => {
      show(card, own, 1, 0);
      pressed(Number(card.dataset.chosen));
    };
    if (stops.length) {
      const part = find(document, "#searching").content.firstElementChild.cloneNode(true);
      const label = find(part, "label"), told = find(part, "output");
      slider = find(part, "input");
      slider.id = `${card.id || name}-search`;
      slider.max = stops.length;
      slider.value = stops.length;
      label.htmlFor = slider.id;
      label.textContent = "search";
      slider.setAttribute("aria-label", `search for ${name}`);
      const move = () => {
        const place = Number(slider.value), stop = stops[place];
        const text = stop ? `step ${stop[0]}${Number.isFinite(stop[1]) ? `, match ${stop[1]}` : ""}` : "as returned";
        told.textContent = text;
        slider.setAttribute("aria-valuetext", text);
        if (stop && steps.length) {
          show(card, card.dataset.frames, steps.length, place);
          pressed(Number(card.dataset.chosen));
        } else returned();
      };
      slider.addEventListener("input", move);
      move();
      find(card, "figure").append(part);
    }
    if (card.dataset.restarts) {
      const part = find(document, "#restarting").content.firstElementChild.cloneNode(true);
      const matches = card.dataset.matches.split(" "), chosen = Number(card.dataset.chosen);
      part.setAttribute("aria-label", `restarts for ${name}`);
      find(part, "span").textContent = "restart";
      matches.forEach((match, place) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = place === chosen ? `${place + 1} (chosen)` : String(place + 1);
        button.title = `match ${match}`;
        button.addEventListener("click", () => {
          if (slider) {
            slider.value = slider.max;
            slider.dispatchEvent(new Event("input"));
          }
          if (place !== chosen) show(card, card.dataset.restarts, matches.length, place);
          pressed(place);
        });
        buttons.push(button);
        part.append(button);
      });
      pressed(chosen);
      find(card, "figure").append(part);
    }
  };

  const cards = [...document.querySelectorAll(".card")];
  const eye = new IntersectionObserver(
    (seen) => seen.filter((one) => one.isIntersecting).forEach((one) => { equip(one.target); eye.unobserve(one.target); }),
    { rootMargin: "400px" });
  cards.forEach((card) => eye.observe(card));

  // --- filter and sort ----------------------------------------------------------------------------------------------

  const controls = find(document, "#controls");
  const few = 12;
  const groups = [...document.querySelectorAll("[data-group]")].map((group) => ({
    group, first: find(group, "[data-first]"), more: find(group, "[data-more]"), fold: find(group, "details.more"),
    cards: [...group.querySelectorAll(".card")],
  }));
  const linked = new Map(groups.flatMap((one) => one.cards.map((card) => [card.id, card])));
  const value = (card, name) => (Number.isFinite(parseFloat(card.dataset[name])) ? parseFloat(card.dataset[name]) : -1e9);
  const orders = {
    "": null,  // as the page came: clearest first; "faint" is the reverse
    name: (a, b) => a.dataset.name.localeCompare(b.dataset.name, "en", { numeric: true }),
  };
  const order = (sort) => (sort in orders ? orders[sort] : (a, b) => value(b, sort) - value(a, sort));
  const shown = find(document, "#shown"), noun = shown ? shown.textContent.replace(/^\d+ /, "") : "";
  const wanted = () => Object.fromEntries([...new FormData(controls)].filter(([, text]) => text !== ""));

  const apply = () => {
    const { sort = "", name = "", ...same } = wanted();
    const fits = (card) => Object.entries(same).every(([key, text]) => card.dataset[key] === text)
      && card.dataset.name.toLowerCase().includes(name.trim().toLowerCase());
    let count = 0;
    for (const one of groups) {
      const kept = one.cards.filter(fits);
      if (sort === "faint") kept.reverse();
      else if (order(sort)) kept.sort(order(sort));
      one.first.replaceChildren(...kept.slice(0, few));
      one.more.replaceChildren(...kept.slice(few));
      one.fold.hidden = kept.length <= few;
      find(one.fold, "summary").textContent = `${Math.max(0, kept.length - few)} more`;
      one.group.hidden = kept.length === 0;
      count += kept.length;
    }
    shown.textContent = count === linked.size ? `${count} ${noun}` : `${count} of ${linked.size} ${noun}`;
  };

  const fill = (asked) => {
    for (const part of controls.elements) {
      if (!part.name) continue;
      part.value = asked.get(part.name) || "";
      if (part.tagName === "SELECT" && part.selectedIndex < 0) part.value = "";
    }
    apply();
  };

  const follow = () => {
    const [place, asked] = location.hash.slice(1).split("?");
    if (place === "gallery" && asked !== undefined) {
      fill(new URLSearchParams(asked));
      find(document, "#gallery").scrollIntoView();
    } else if (linked.has(place)) {
      const card = linked.get(place);
      if (!card.isConnected) fill(new URLSearchParams());
      const fold = card.closest("details");
      if (fold) fold.open = true;
      equip(card);
      card.scrollIntoView({ block: "center" });
      card.focus({ preventScroll: true });
    }
  };

  if (controls) {
    const change = () => {
      apply();
      const asked = new URLSearchParams(wanted()).toString();
      history.replaceState(null, "", asked ? `#gallery?${asked}` : "#gallery");
    };
    controls.addEventListener("input", change);
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("reset", () => setTimeout(change));
    for (const link of document.querySelectorAll("a[data-defence]"))
      link.hash = `gallery?${new URLSearchParams({ defence: link.dataset.defence })}`;
    window.addEventListener("hashchange", follow);
    if (location.hash) follow();
  }

  // --- tables ---------------------------------------------------------------------------------------------------------

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "order";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const read = (row) => row.cells[column].textContent.trim(), sign = down ? -1 : 1;
        body.replaceChildren(...[...body.rows].sort((a, b) => {
          const [x, y] = [parseFloat(read(a)), parseFloat(read(b))];
          if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;  // what has no number comes last
          return sign * (Number.isNaN(x) ? read(a).localeCompare(read(b)) : x - y);
        }));
      });
    });
  }

  // --- print ------------------------------------------------------------------------------------------------------------

  const print = find(document, "#print");
  if (print) print.addEventListener("click", () => {
    location.hash = "evidence";
    setTimeout(() => window.print());
  });
})();
