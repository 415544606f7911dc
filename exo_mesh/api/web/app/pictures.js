// Images of a message: made smaller here, because they are kept in this browser and sent again with every message.
const MOST_SIDE = 1536; // pixels; models make images smaller anyway
export const MOST_IMAGES = 8;

/** Whether a model of the list takes images. */
export function takesImages(model) {
  return Boolean(model?.capabilities?.modalities.input.includes("image"));
}

/** The image files among those that were chosen, pasted or dropped. */
export function imageFiles(list) {
  return [...(list ?? [])].filter((file) => file.type.startsWith("image/"));
}

/** A data URL of a file's image, with sides of at most MOST_SIDE pixels. Raises for a file that is no image. */
export async function dataUrlOf(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind transparent parts
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.85);
}

/** The content of a message as the API takes it: a text, or parts if there are images. */
export function contentOf({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}
