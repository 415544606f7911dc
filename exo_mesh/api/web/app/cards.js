// The models of the cards that no peer has, fetched when a view first shows them and again after a change of the models.
import { call, mesh } from "./mesh.js";
import { models } from "./models.js";
import { useEffect, useState } from "./ui.js";

let kept = { of: null, list: null };

/** The list of cards without files; null until it is there. */
export function useCards() {
  const [list, setList] = useState(kept.list);
  const of = `${mesh.base} ${models.list.map((one) => one.id).join(" ")}`;
  useEffect(() => {
    let wanted = true;
    if (!mesh.document || kept.of === of) return undefined;
    call("/v1/models?status=known").then(({ data }) => {
      kept = { of, list: data };
      if (wanted) setList(data);
    }, () => {}); // without cards there is still the search
    return () => { wanted = false; };
  }, [of, Boolean(mesh.document)]);
  return list;
}

/** Whether a machine of the mesh may ask the hub. */
export function reachesHub(peers) {
  return Object.values(peers).some((one) => one.fetches === "hub");
}
