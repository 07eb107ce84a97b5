// Shows what the server's feed of events says of its engines.
const state = document.querySelector("#state"), form = document.querySelector("#key"), body = document.querySelector("tbody");
let key = "";

function on(name, data) {
  if (name === "hello") state.textContent = `${data.models[0]}, policy ${data.policy.name}`;
  if (name !== "tick") return;
  body.replaceChildren(...data.engines.map((e) => {
    const row = document.createElement("tr");
    const shown = [e.engine, e.state, e.running, e.waiting, `${e.kv_blocks_used} of ${e.kv_blocks}`, e.generation_tokens];
    for (const value of shown) row.insertCell().textContent = value;
    return row;
  }));
}

async function read() {
  const answer = await fetch("console/events", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  form.hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "This server wants an API key" : `The server says ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "";;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server has ended the connection");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const found = part.match(/^event: (\w+)\ndata: (.*)$/);
      if (found) on(found[1], JSON.parse(found[2]));
    }
  }
}

async function run() {
  for (;;) {
    await read().catch((error) => { state.textContent = error.message; });
    await new Promise((go) => setTimeout(go, 1000));
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); key = form.querySelector("input").value.trim(); });
run();
