// The body of the request for the next answer of a conversation. Pure but for the tools that the node offers.
import { withFiles } from "./attachments.js";
import { contentOf } from "./pictures.js";
import { thinkingFields } from "./thinking.js";
import { offeredTools, takesTools, toolsOf } from "./web_tools.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** model: of the list, or undefined while it is unknown. begun: the stopped answer that is to be continued, or null. */
export function requestOf({ model: name, settings, messages }, model, begun = null) {
  const sent = sentMessages(messages);
  if (settings.system) sent.unshift({ role: "system", content: settings.system });
  const body = { model: name, messages: sent, stream: true, stream_options: { include_usage: true } };
  if (begun) {
    const thought = begun.reasoning ? { reasoning_content: begun.reasoning } : {};
    sent.push({ role: "assistant", content: begun.content, ...thought });
    body.continue_final_message = true;
  }
  for (const key of NUMBERS) {
    const value = (settings[key] ?? "") === "" ? NaN : Number(settings[key]);
    if (Number.isFinite(value)) body[key] = value;
  }
  Object.assign(body, thinkingFields(settings.thinking, model));
  const tools = settings.web && takesTools(model) ? offeredTools() : [];
  if (tools.length) body.tools = toolsOf(tools);
  return body;
}

/** The messages as the API takes them: calls only with their results, answers only with a text or such calls. */
function sentMessages(messages) {
  const sent = [];
  messages.forEach((one, index) => {
    if (one.role === "user") return sent.push({ role: "user", content: contentOf({ ...one, content: withFiles(one.content, one.files) }) });
    if (one.role === "tool") return sent.push({ role: "tool", tool_call_id: one.call, content: one.content });
    const answered = messages[index + 1]?.role === "tool" ? one.calls : [];
    const calls = answered.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    if (calls.length) return sent.push({ role: "assistant", content: one.content || null, tool_calls: calls });
    return one.content && sent.push({ role: "assistant", content: one.content });
  });
  return sent;
}
