// Models of model servers: they have no files, no size and no layers in the mesh.

/** Whether an instance only passes text on to a model server. */
export function isServed(live, instance) {
  if (!instance) return false;
  return Object.values(live?.peers ?? {}).some((peer) => (peer.served ?? []).some((one) => one.name === instance.model));
}

/** Whether a listed model is only at a model server. */
export const isOnlyServed = (model) => (model.served_by?.length ?? 0) > 0 && !(model.num_bytes > 1);
