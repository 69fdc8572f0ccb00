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

let drawn = "";

// Draws the maps, if they are seen and have changed.
async function showResidency() {
  if (element("models").hidden) return;
  const reply = await (await ask("/ui/residency")).json();
  const state = JSON.stringify(reply);
  if (state === drawn) return;
  drawn = state;
  element("maps").replaceChildren(...reply.models.flatMap((model) => {
    const name = make("dt", model.model);
    const map = make("dd");
    map.append(mapOf(model.segments));
    return [name, map];
  }));
  element("no-maps").hidden = reply.models.length > 0;
}
