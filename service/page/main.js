// Puts the parts of the page together.

import { hasKey, useKey } from "./api.js";
import { Ask } from "./ask.js";
import { byId, show } from "./dom.js";
import { amount } from "./format.js";
import { Live } from "./live.js";

function describe(info) {
  const parts = [info.model, info.dtype, amount(info.threads, "thread"), `up to ${amount(info.max_tokens, "token")}`];
  show("model", parts.join(" · "));
  show("version", `AttnCache ${info.version}`);
  byId("compiled-off").hidden = info.compiled_off === null;
  show("compiled-off", info.compiled_off === null ? "" : `This server computes slowly, without compiled code: ${info.compiled_off}.`);
  document.title = `${info.model} – AttnCache`;
  box.describe(info);
}

const dialog = byId("key-dialog");
let refused = false; // the visitor closed the dialog, so it opens only when asked for again

function askForKey() {
  byId("key-unknown").hidden = !hasKey();
  if (!dialog.open && !refused) dialog.showModal();
}

const box = new Ask(() => {
  refused = false;
  askForKey();
});
const live = new Live(describe);
live.onKeyNeeded = askForKey;

byId("key-form").addEventListener("submit", () => {
  useKey(byId("key").value.trim());
  byId("key").value = "";
  live.resume();
});
byId("key-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  refused = dialog.returnValue === "" && live.stopped;
});

byId("pause").addEventListener("click", () => {
  const paused = !live.paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  show("pause", paused ? "Resume" : "Pause");
  live.pause(paused);
});

live.start();
