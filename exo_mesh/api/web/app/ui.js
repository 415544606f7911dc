// Exports Preact, its hooks and htm; every view imports them from here.
import { h, render, Fragment } from "../vendor/preact/preact.mjs";
import htm from "../vendor/htm/htm.mjs";

export { render, Fragment };
export { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact/hooks.mjs";
export const html = htm.bind(h);
