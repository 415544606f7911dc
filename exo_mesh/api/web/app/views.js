// The views of the page. The chat comes with the page; the others come right after it, so that the first load is small
// and no view needs a node that may be gone later.
import { ChatView } from "./chat.js";

const LATER = {
  mesh: () => import("./mesh_view.js").then((found) => found.MeshView),
  models: () => import("./models_view.js").then((found) => found.ModelsView),
  requests: () => import("./requests_view.js").then((found) => found.RequestsView),
  settings: () => import("./settings_view.js").then((found) => found.SettingsView),
};
const here = { chat: ChatView };

export const VIEW_NAMES = ["chat", ...Object.keys(LATER)];

/** The component of a view; undefined until it has come. came(): called then. */
export function viewOf(name, came) {
  if (!here[name]) fetchView(name).then(came, () => {}); // asked again with the next redraw
  return here[name];
}

async function fetchView(name) {
  here[name] ??= await LATER[name]();
}

/** Fetches all views, one after the other. */
export async function fetchViews() {
  for (const name of VIEW_NAMES) await fetchView(name).catch(() => {});
}
