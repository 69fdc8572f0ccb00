// Maps of which segments of a model are on the device: a cell a segment, or a group of neighbours.

const CELLS_MAX = 384;

// The state of a group that needs attention wins; else the share of it that is resident.
function cellOf(group) {
  for (const [mark, name] of [[">", "flight"], ["@", "use"], ["*", "pinned"]]) {
    if (group.includes(mark)) return name;
  }
  const there = group.split("#").length - 1;
  return there === 0 ? "absent" : there === group.length ? "resident" : "some";
}

const isThere = (segment) => segment !== "." && segment !== ">";

function mapOf(segments) {
  const step = Math.ceil(segments.length / CELLS_MAX) || 1;
  const map = make("div", undefined, "map");
  const there = Array.from(segments).filter(isThere).length;
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", there + " of " + segments.length + " segments resident");
  for (let at = 0; at < segments.length; at += step) {
    map.append(make("i", undefined, cellOf(segments.slice(at, at + step))));
  }
  return map;
}

// What is drawn: NAME -> {segments, name, map}.
const residency = new Map();

function drawResidency(model) {
  const before = residency.get(model.model);
  if (before && before.segments === model.segments) return before;
  const name = before ? before.name : make("dt", model.model);
  const map = before ? before.map : make("dd");
  map.replaceChildren(mapOf(model.segments));
  return { segments: model.segments, name, map };
}

let toldMaps = { maps: [], left_out: 0 };

// Draws the maps, if they are seen; those that have not changed stay as they are.
function showResidency() {
  if (element("models").hidden) return;
  const drawn = toldMaps.maps.map((model) => [model.model, drawResidency(model)]);
  const names = drawn.map(([name]) => name).join("\n");
  const isSame = names === Array.from(residency.keys()).join("\n");
  residency.clear();
  for (const [name, parts] of drawn) residency.set(name, parts);
  if (!isSame) element("maps").replaceChildren(...drawn.flatMap(([, parts]) => [parts.name, parts.map]));
  element("no-maps").hidden = drawn.length > 0;
  element("more-maps").hidden = toldMaps.left_out === 0;
  element("more-maps").textContent = toldMaps.left_out + " more models have weights on the device.";
}
