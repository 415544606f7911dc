// Keeps the files of the page, so that it opens as an app while its node is gone. It never touches calls of the API.
// The node fills in the version and the paths of the files.
const VERSION = "{{version}}";
const FILES = ["{{files}}"];
const START = "/dashboard";
const ANY = { ignoreVary: true }; // each path has one content
const NODE_MS = 4000; // a node that does not answer in this time counts as gone

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll([START, ...FILES])));
});

self.addEventListener("activate", (event) => {
  event.waitUntil(caches.keys().then((names) => Promise.all(names.filter((name) => name !== VERSION).map((name) => caches.delete(name)))));
});

self.addEventListener("fetch", (event) => {
  const { method, mode, url } = event.request;
  const { origin, pathname } = new URL(url);
  if (method !== "GET" || origin !== location.origin) return;
  if (mode === "navigate" && ["/", START].includes(pathname)) event.respondWith(start(event.request));
  else if (pathname.startsWith("/page/")) event.respondWith(file(event.request));
});

/** The page of the node if it answers, else the kept one. The kept one is renewed: it names the members to call. */
async function start(request) {
  try {
    const reply = await fetch(request.url, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(NODE_MS) });
    if (reply.ok) await (await caches.open(VERSION)).put(START, reply.clone());
    return reply;
  } catch (error) {
    return (await caches.match(START, ANY)) ?? Promise.reject(error);
  }
}

/** A file of the page; its path changes with its content. Languages can change, so the node's comes first. */
async function file(request) {
  const { pathname } = new URL(request.url);
  if (!pathname.startsWith("/page/languages")) return (await caches.match(request, ANY)) ?? fetch(request);
  try {
    const reply = await fetch(request, { signal: AbortSignal.timeout(NODE_MS) });
    if (reply.ok) await (await caches.open(VERSION)).put(request, reply.clone());
    return reply;
  } catch (error) {
    return (await caches.match(request, ANY)) ?? Promise.reject(error);
  }
}
