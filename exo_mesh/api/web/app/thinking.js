// The choices of thinking that a model offers, and the fields of a request that make each. Pure.
const EFFORTS = ["low", "medium", "high"];

/** The choices for a model of the list, the first is the model's own way: [""], or with on and off, or with efforts. */
export function thinkingChoices(model) {
  const { supported = false, toggle = false, effort = false, default_effort: usual } = model?.capabilities?.thinking ?? {};
  if (!supported || !(toggle || effort || usual)) return [];
  const efforts = effort || usual ? EFFORTS : ["on"];
  return ["", ...(toggle ? ["off"] : []), ...efforts];
}

/** The fields of a request for a choice; nothing for a choice that the model does not offer. */
export function thinkingFields(choice, model) {
  if (!choice || !thinkingChoices(model).includes(choice)) return {};
  if (choice === "on") return { enable_thinking: true };
  return choice === "off" ? { enable_thinking: false } : { reasoning_effort: choice };
}
