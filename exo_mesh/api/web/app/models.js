// The models of all peers, fetched again whenever the live document shows a change of them.
import { call, mesh, onMesh } from "./mesh.js";
import { useLayoutEffect, useReducer } from "./ui.js";

export const models = { list: [], error: null, loaded: false };
let seen = null;
const listeners = new Set();

function fingerprint() {
  const { peers = {}, instances = {}, downloads = {} } = mesh.document ?? {};
  const parts = [
    Object.values(peers).map((peer) => [peer.id, peer.models, peer.partial_models]),
    Object.values(instances).map((one) => [one.id, one.state]),
    Object.values(downloads).map((one) => [one.peer, one.model, one.state]),
  ];
  return JSON.stringify(parts);
}

export async function reloadModels() {
  try {
    models.list = (await call("/v1/models")).data;
    models.error = null;
    models.loaded = true;
  } catch (error) {
    models.error = error;
  }
  for (const listener of listeners) listener();
}

onMesh(() => {
  if (!mesh.document || mesh.needsKey) return;
  const now = fingerprint();
  if (now === seen) return;
  seen = now;
  reloadModels();
});

export function useModels() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => {
    listeners.add(redraw);
    return () => listeners.delete(redraw);
  }, []);
  return models;
}

/** A model id as part of a path: hub ids keep their slash, because the routes expect it. */
export function inPath(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}
