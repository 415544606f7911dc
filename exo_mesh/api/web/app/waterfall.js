// The waterfall of one request: a row for the request, one for each stage; links, waiting and computing as bars.
import { seconds } from "./format.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";
import { stageClass } from "./who_computed.js";

const WIDTH = 1000, LEFT = 170, ROW = 30, TOP = 24;
const MOST_BARS = 3000; // a long trace shows only bars that are wide enough to see
const KINDS = ["place", "queue", "hop", "wait", "compute"];

/** trace: in the Trace Event Format, times in microseconds. named: returns the name of a peer. */
export function Waterfall({ trace, named }) {
  const spans = trace.traceEvents.filter((event) => event.ph === "X");
  const end = Math.max(1, ...spans.map((span) => span.ts + span.dur));
  const [[from, to], show] = useState(() => firstLaps(spans, end));
  const rows = rowsOf(trace, named);
  const width = to - from;
  const x = (at) => LEFT + ((WIDTH - LEFT) * (at - from)) / width;
  const bars = barsOf(spans, from, to);
  const tokens = trace.traceEvents.filter((event) => event.ph === "i" && event.ts >= from && event.ts <= to).slice(0, MOST_BARS);
  const zoom = (factor, shift = 0) => {
    const wide = Math.min(end, Math.max(50, width * factor));
    const start = Math.max(0, Math.min(end - wide, (from + to) / 2 - wide / 2 + shift * width));
    show([start, start + wide]);
  };
  const label = t("waterfall.label", { from: seconds(from / 1e6), to: seconds(to / 1e6) });
  return html`<div class="waterfall">
    <div class="choices">
      <button type="button" onClick=${() => show([0, end])}>${t("waterfall.whole")}</button>
      <button type="button" onClick=${() => zoom(0.5)}>${t("waterfall.in")}</button>
      <button type="button" onClick=${() => zoom(2)}>${t("waterfall.out")}</button>
      <button type="button" onClick=${() => zoom(1, -0.5)}>${t("waterfall.earlier")}</button>
      <button type="button" onClick=${() => zoom(1, 0.5)}>${t("waterfall.later")}</button>
    </div>
    <div class="scroll" tabindex="0"><svg viewBox="0 0 ${WIDTH} ${TOP + ROW * rows.length + 4}" role="img" aria-label=${label}>
      ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<g key=${share} class="tick">
        <path d="M${x(from + share * width)} ${TOP - 4}V${TOP + ROW * rows.length}" />
        <text x=${x(from + share * width)} y="14" text-anchor=${share === 1 ? "end" : share ? "middle" : "start"}>${seconds((from + share * width) / 1e6)}</text></g>`)}
      ${rows.map(([tid, name, turn], i) => html`<g key=${tid}>${turn !== null && html`<rect class="stage-mark ${stageClass(turn)}" x="0" y=${TOP + ROW * i + 7} width="11" height="11" rx="3" />`}
        <text class="row-name" x=${turn === null ? 0 : 17} y=${TOP + ROW * i + 18}>${name.slice(0, 18)}</text></g>`)}
      ${bars.map((span, i) => {
        const row = rows.findIndex(([tid]) => tid === span.tid);
        const start = Math.max(LEFT, x(span.ts)), stop = Math.min(WIDTH, x(span.ts + span.dur));
        return html`<rect key=${i} class="kind-${span.cat}" x=${start.toFixed(2)} width=${Math.max(0.6, stop - start).toFixed(2)}
          y=${TOP + ROW * row + (span.cat === "hop" ? 10 : 4)} height=${span.cat === "hop" ? 7 : 19}><title>${span.name}: ${seconds(span.dur / 1e6)}</title></rect>`;
      })}
      ${tokens.map((token, i) => html`<path key=${i} class="token" d="M${x(token.ts).toFixed(2)} ${TOP + 2}v23" />`)}
    </svg></div>
    <p class="legend">${KINDS.map((kind) => html`<span key=${kind}><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="kind-${kind}" width="10" height="10" /></svg>${t(`waterfall.${kind}`)}</span>`)}</p>
  </div>`;
}

/** The range to show first: up to the end of the first twelve laps; a short request is shown completely. */
function firstLaps(spans, end) {
  const laps = spans.filter((span) => span.cat === "compute" && span.tid === 1);
  return [0, laps.length > 20 ? laps[12].ts : end];
}

function rowsOf(trace, named) {
  return trace.traceEvents.filter((event) => event.ph === "M").map((event) => {
    const stage = /stage (\d+) (.*)$/.exec(event.args.name);
    return [event.tid, stage ? `${stage[1]} ${named(stage[2])}` : t("waterfall.request"), stage ? Number(stage[1]) : null];
  }).filter(([tid], i, all) => all.findIndex(([other]) => other === tid) === i);
}

function barsOf(spans, from, to) {
  const seen = spans.filter((span) => KINDS.includes(span.cat) && span.dur > 0 && span.ts < to && span.ts + span.dur > from);
  if (seen.length <= MOST_BARS) return seen;
  const least = seen.map((span) => span.dur).sort((a, b) => b - a)[MOST_BARS - 1];
  return seen.filter((span) => span.dur >= least).slice(0, MOST_BARS);
}
