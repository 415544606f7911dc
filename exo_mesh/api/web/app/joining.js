// How another machine joins an open mesh: by the settings of the node that serves the page. Pure.

const LOOPBACK = /^(127\.|::1$|localhost$)/;

/** settings: those of GET /config; addresses: of the node, "host:port". Returns {text, command}: the key of what to say,
 * and what to type on the other machine; "" where nothing helps. */
export function joinBy(settings, addresses = []) {
  const value = (name) => settings.find((one) => one.name === name)?.value ?? "";
  if (LOOPBACK.test(value("host"))) return { text: "first.machineLocal", command: "" };
  const namespace = value("namespace"), own = namespace && namespace !== "default" ? ` --namespace ${namespace}` : "";
  if (/\b(udp|mdns)\b/.test(value("discovery"))) return { text: "first.machineOpen", command: `exo-mesh${own}` };
  return { text: "first.machineByAddress", command: addresses.length ? `exo-mesh${own} --bootstrap-peers ${addresses[0]}` : "" };
}
