// What the server computes: one request at a time, with what it is doing meanwhile.

async function post(path, content) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `The server answers ${answer.status}.`);
  return answer;
}

// Asks for a state, and for what else is `asked` of it; `step` gets what is being done. Gives null if it was cancelled.
export async function compute(address, asked, step, cancelled) {
  const { job } = await (await post("jobs", { address, ...asked })).json();
  const cancel = () => post(`jobs/${job}/cancel`, {}).catch(() => {});
  if (cancelled.aborted) {  // while the request was on its way
    await cancel();
    return null;
  }
  const events = new EventSource(`jobs/${job}`);
  cancelled.addEventListener("abort", cancel, { once: true });
  try {
    return await new Promise((resolve, reject) => {
      const on = (what, act) => events.addEventListener(what, ({ data }) => act(JSON.parse(data)));
      on("step", step);
      on("done", resolve);
      on("cancelled", () => resolve(null));
      on("failed", (why) => reject(new Error(why)));
      events.onerror = () => reject(new Error("The server no longer answers; start `kvprobe app` again."));
    });
  } finally {
    events.close();
  }
}

export const opened = async () => (await fetch("session.json")).json();

// The session as one file that opens offline.
export async function shared(session) {
  return (await post("share", session)).blob();
}
