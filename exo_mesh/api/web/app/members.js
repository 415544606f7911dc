// Remembers in this browser which nodes the mesh had, for a page that begins while its own node is gone.
const MOST = 64;
let written = "";

/** {closed, list: [{name, url}]}. closed: whether the mesh needs a key, as the node of this page said. */
export function rememberedMembers() {
  try {
    const { closed, list } = JSON.parse(localStorage.getItem("exo.members"));
    return { closed: closed === true, list: list.filter(({ name, url }) => typeof name === "string" && /^https?:\/\/[^/]+$/.test(url)) };
  } catch {
    return { closed: false, list: [] };
  }
}

/** peers: of the live document. own: the node of this page, which stays in the list when it has gone. */
export function rememberMembers(peers, closed, own) {
  const others = Object.values(peers ?? {}).filter((peer) => peer.api_url && peer.api_url !== own.url).map((peer) => ({ name: peer.name, url: peer.api_url }));
  const text = JSON.stringify({ closed, list: [own, ...others].slice(0, MOST) });
  if (text === written) return;
  written = text;
  try {
    localStorage.setItem("exo.members", text);
  } catch {} // no room: the page works without
}
