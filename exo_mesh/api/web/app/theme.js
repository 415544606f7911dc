// The theme of the page, stored in this browser.
export const THEMES = ["auto", "light", "dark"];

export function theme() {
  return localStorage.getItem("exo.theme") ?? THEMES[0];
}

export function applyTheme() {
  if (theme() === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme();
}

export function chooseTheme(name) {
  localStorage.setItem("exo.theme", name);
  applyTheme();
  dispatchEvent(new Event("exo-preferences"));
}
