// What an empty chat shows: the mesh, questions that the model can answer, and the two next steps.
import { reachesHub, useCards } from "./cards.js";
import { fitText, sizeText, suggested } from "./fitting.js";
import { bytes } from "./format.js";
import { joinBy } from "./joining.js";
import { call, mayAdmin, mesh, rateOf } from "./mesh.js";
import { Ring } from "./ring.js";
import { Invite } from "./settings_invite.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

const DEMO = "exo-mesh-demo";
const OFFERED = 3;

/** model: the chosen one, as GET /v1/models lists it. ask(text): sends a question. */
export function FirstLook({ model, canSend, ask }) {
  const live = mesh.document;
  return html`<div class="first-look">
    <h1>${t("chat.hello")}</h1>
    <p class="hint">${t("chat.hint")}</p>
    ${live && html`<${SmallMesh} live=${live} model=${model} />`}
    ${model && html`<ul class="questions" aria-label=${t("first.questions")}>${questionsFor(model).map((key) => html`
      <li key=${key}><button type="button" disabled=${!canSend} onClick=${() => ask(t(key))}>${t(key)}</button></li>`)}</ul>`}
    ${live && html`<div class="steps"><${ModelStep} live=${live} hasModel=${Boolean(model)} /><${MachineStep} live=${live} /></div>`}
  </div>`;
}

/** Three questions: the demo model counts and says who it is, and a model for code writes code. */
export function questionsFor(model) {
  if (model.id === DEMO) return ["first.demo1", "first.demo2", "first.demo3"];
  if (/cod(e|er)/i.test(model.id)) return ["first.code1", "first.code2", "first.code3"];
  return ["first.any1", "first.any2", "first.any3"];
}

/** The picture of the mesh, as a link to its view. */
function SmallMesh({ live, model }) {
  const peers = Object.values(live.peers), instance = Object.values(live.instances).find((one) => one.model === model?.id) ?? Object.values(live.instances)[0];
  const names = (instance?.stages ?? []).flatMap((stage) => stage.group?.peers ?? [stage.peer]).map((id) => live.peers[id]?.name ?? id.slice(0, 8));
  const total = peers.reduce((sum, one) => sum + (one.total_bytes ?? 0), 0);
  const machines = t("first.machines", { n: peers.length, memory: bytes(total) });
  const runs = instance ? ` ${t("first.runs", { model: instance.model, peers: names.join(", ") })}` : "";
  return html`<a class="small-mesh" href="#/mesh">
    <${Ring} document=${live} instance=${instance} rate=${rateOf(instance)} isNarrow=${false} isRecovering=${false} isSmall chosen="" />
    <span>${machines}${runs}</span></a>`;
}

function ModelStep({ live, hasModel }) {
  const known = useCards();
  const found = suggested(known ?? [], live.peers, OFFERED);
  const canFetch = reachesHub(live.peers);
  return html`<section class="step"><h2>${t(hasModel ? "first.model" : "first.modelFirst")}</h2>
    ${!canFetch ? html`<p class="quiet">${t("hub.offline")}</p>` : html`
      ${!known && html`<p class="quiet">${t("chat.looking")}</p>`}
      ${known && !found.length && html`<p class="quiet">${t("hub.nothingFits")}</p>`}
      <ul>${found.map(({ model, fit }) => html`<li key=${model.id}><strong>${model.id}</strong><span class="quiet">${sizeText(model)} · ${fitText(fit)}</span></li>`)}</ul>`}
    <p><a class="button" href="#/models">${t("first.seeModels")}</a></p></section>`;
}

function MachineStep({ live }) {
  const [shown, show] = useState(false);
  const isClosed = live.health?.mesh === "closed", join = useJoin(live, isClosed);
  return html`<section class="step"><h2>${t("first.machine")}</h2>
    ${isClosed ? html`<p class="quiet">${t("first.machineClosed")}</p>
      <p><button type="button" aria-expanded=${shown ? "true" : "false"} onClick=${() => show(!shown)}>${t("first.invite")}</button></p>
      ${shown && html`<${Invite} may=${mayAdmin()} />`}` : join && html`<p class="quiet">${t(join.text)}</p>${join.command && html`<pre class="command" tabindex="0">${join.command}</pre>`}`}
  </section>`;
}

/** How a machine joins an open mesh; null until the node has said its settings. */
function useJoin(live, isClosed) {
  const [settings, setSettings] = useState(null);
  useEffect(() => {
    let wanted = true;
    if (!isClosed) call("/config").then((found) => wanted && setSettings(found.settings), () => {});
    return () => { wanted = false; };
  }, [isClosed, mesh.base]);
  return settings && joinBy(settings, live.peers[live.node_id]?.addresses);
}
