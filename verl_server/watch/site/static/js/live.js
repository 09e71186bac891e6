/**
 * `LiveFeed`: tells the page when a run has grown.
 *
 * `main` starts it. It listens while the tab is in sight, and connects again after a pause that doubles up to 15 s.
 */

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15000;

export class LiveFeed {
  /**
   * @param {import("./api.js").Api} api
   * @param {(event: any) => void} onGrow Gets the data of an event: `Live` in answers/runs.py.
   * @param {(state: "live" | "connecting" | "paused") => void} onState
   */
  constructor(api, onGrow, onState) {
    this.api = api;
    this.onGrow = onGrow;
    this.onState = onState;
    /** @type {AbortController | null} */
    this.connection = null;
    this.pause = FIRST_PAUSE;
    this.timer = 0;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#follow());
    this.#follow();
  }

  #follow() {
    clearTimeout(this.timer);
    if (document.hidden) {
      this.connection?.abort();
      this.connection = null;
      this.onState("paused");
    } else if (!this.connection) {
      this.pause = FIRST_PAUSE;
      void this.#connect();
    }
  }

  async #connect() {
    const connection = new AbortController();
    this.connection = connection;
    this.onState("connecting");
    const opened = () => {
      this.pause = FIRST_PAUSE;
      this.onState("live");
    };
    try {
      await this.api.listen(this.onGrow, opened, connection.signal);
    } catch {
      // The state in the head of the page tells it, and the next attempt follows.
    }
    if (connection.signal.aborted || this.connection !== connection) return;
    this.onState("connecting");
    this.timer = window.setTimeout(() => void this.#connect(), this.pause);
    this.pause = Math.min(LONGEST_PAUSE, 2 * this.pause);
  }
}
