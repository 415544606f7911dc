// Files beside a message: text and code are read here, the text of a PDF by the node. They are sent as part of the text.
import { fetchAt, mesh, ApiError } from "./mesh.js";

export const MOST_FILES = 20;
export const MOST_TEXT_BYTES = 1 << 20;
export const MOST_PDF_BYTES = 16 << 20;
const PDF_MS = 40000;

/** Raised for a file that cannot be read; `key` is the text that says why. */
export class FileError extends Error {
  constructor(key, name) {
    super(key);
    this.key = key;
    this.name = name;
  }
}

const isPdf = (file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

/** {name, text, isCut} of a file. Raises FileError, or the error of the node that reads a PDF. */
export async function textFileOf(file) {
  if (isPdf(file)) return pdfOf(file);
  if (file.size > MOST_TEXT_BYTES) throw new FileError("files.tooLarge", file.name);
  const text = decoded(await file.arrayBuffer());
  if (text === null) throw new FileError("files.noText", file.name);
  return { name: file.name, text, isCut: false };
}

/** The text of bytes in UTF-8 or UTF-16 with a mark, else null: other bytes are no text that a model could read. */
export function decoded(buffer) {
  const bytes = new Uint8Array(buffer);
  const is16 = (bytes[0] === 0xff && bytes[1] === 0xfe) || (bytes[0] === 0xfe && bytes[1] === 0xff);
  try {
    const text = new TextDecoder(is16 ? (bytes[0] === 0xff ? "utf-16le" : "utf-16be") : "utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

async function pdfOf(file) {
  if (file.size > MOST_PDF_BYTES) throw new FileError("files.tooLarge", file.name);
  const options = { method: "POST", headers: { "Content-Type": "application/pdf" }, body: file };
  const reply = await fetchAt(mesh.base, "/v1/tools/pdf_text", options, PDF_MS);
  const found = await reply.json().catch(() => null);
  if (!reply.ok) throw new ApiError(reply.status, found);
  return { name: file.name, text: found.text, isCut: found.truncated };
}

/** The text of a message with its files before it, each in a fence that its text cannot end. */
export function withFiles(text, files) {
  const parts = (files ?? []).map(({ name, text: inner }) => {
    const longest = Math.max(2, ...(inner.match(/`+/g) ?? []).map((found) => found.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${inner.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}
