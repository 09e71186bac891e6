/**
 * The page's one way to its answers: the server's `/api`, or the answers inside an exported page.
 *
 * Views call `Api.get` with addresses from `places`. An exported page has its answers, by address, in the element
 * `#answers`; what is not there is reported as "not in this export". The package `answers` is the contract.
 */

const KEY_NAME = "verl-server-watch-key";
const KEPT = 48;

/** An answer that is an error: what is wrong, and what helps. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 if there was no answer.
   * @param {string} message
   * @param {string} [remedy]
   */
  constructor(status, message, remedy = "") {
    super(message);
    this.status = status;
    this.remedy = remedy;
  }
}

export class Api {
  /**
   * @param {Record<string, any> | null} embedded Address -> answer in an exported page, null if there is a server.
   * @param {() => void} onKeyWanted Called when the server wants a key, or refuses the one that it got.
   */
  constructor(embedded, onKeyWanted) {
    this.embedded = embedded;
    this.onKeyWanted = onKeyWanted;
    /** @type {Map<string, any>} */
    this.kept = new Map();
  }

  get isExport() {
    return this.embedded !== null;
  }

  /** Return true if an exported page has the answer. @param {string} url */
  has(url) {
    return this.embedded === null || url in this.embedded;
  }

  /** @param {string} key */
  setKey(key) {
    sessionStorage.setItem(KEY_NAME, key);
  }

  /**
   * Return the answer of an address.
   * @param {string} url
   * @param {{signal?: AbortSignal, keep?: boolean}} [options] `keep`: the answer never changes, so that it is asked once.
   * @returns {Promise<any>}
   */
  async get(url, { signal, keep = false } = {}) {
    if (this.embedded !== null) {
      const found = this.embedded[url] ?? this.embedded[url.replace("?start=0", "")];
      if (found !== undefined) return found;
      throw new ApiError(404, "This is not in this export.", "Open the run with: verl-server watch RUN");
    }
    if (keep && this.kept.has(url)) return this.#renewed(url);
    const response = await this.#fetch(url, signal);
    const answer = await response.json();
    if (keep) {
      this.kept.set(url, answer);
      const oldest = this.kept.keys().next().value;
      if (this.kept.size > KEPT && oldest !== undefined) this.kept.delete(oldest);
    }
    return answer;
  }

  /** @param {string} url */
  #renewed(url) {
    const answer = this.kept.get(url);
    this.kept.delete(url);
    this.kept.set(url, answer);
    return answer;
  }

  /**
   * Return a response that is no error.
   * @param {string} url
   * @param {AbortSignal} [signal]
   * @returns {Promise<Response>}
   */
  async #fetch(url, signal) {
    const key = sessionStorage.getItem(KEY_NAME);
    /** @type {Record<string, string>} */
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    let response;
    try {
      response = await fetch(url, { headers, signal, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(
        0,
        "The server does not answer.",
        "Is `verl-server watch` still running? The page tries again.",
      );
    }
    if (response.ok) return response;
    if (response.status === 401) this.onKeyWanted();
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error ?? `The server answered ${response.status}.`, body.remedy ?? "");
  }

  /**
   * Read the live events until `signal` ends it. Raise when the connection ends.
   * @param {(event: any) => void} onEvent
   * @param {() => void} onOpen
   * @param {AbortSignal} signal
   */
  async listen(onEvent, onOpen, signal) {
    const response = await this.#fetch("/api/live", signal);
    if (!response.body) throw new ApiError(0, "The live events have no body.");
    onOpen();
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new EventParser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const data of parser.push(decoder.decode(value, { stream: true }))) onEvent(JSON.parse(data));
    }
  }
}

/** Parts a stream of server-sent events into the data of each, wherever the chunks are cut. */
export class EventParser {
  constructor() {
    this.rest = "";
    /** @type {string[]} */
    this.data = [];
  }

  /**
   * @param {string} chunk
   * @returns {string[]} The data of the events that the chunk completes.
   */
  push(chunk) {
    const lines = (this.rest + chunk).split(/\r\n|\n/);
    this.rest = lines.pop() ?? "";
    /** @type {string[]} */
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) events.push(this.data.join("\n"));
        this.data = [];
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      }
    }
    return events;
  }
}

/** Return the answers inside an exported page, null if the page has a server. */
export function embeddedAnswers() {
  const element = document.getElementById("answers");
  return element ? JSON.parse(element.textContent ?? "{}") : null;
}
