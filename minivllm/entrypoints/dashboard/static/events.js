// What is common to the two streams that the page reads, its own and that of an answer.

/** The Server-Sent Events of a response, one by one, as {event, data}. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(tellBreak);
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split(/\r?\n/)) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function tellBreak(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("The connection to the server broke off.");
}

/** Ask the server. Throws an Error whose message is a sentence for people, with the response's status if there was one. */
export async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached: is it still running?");
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = await response.json();
  } catch {
    // no JSON: the status has to do
  }
  const told = body?.error?.message ?? body?.detail;
  const sentence = typeof told === "string" ? told : `The server answered with status ${response.status}.`;
  throw Object.assign(new Error(sentence), { status: response.status });
}
