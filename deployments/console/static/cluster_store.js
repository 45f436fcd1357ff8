// The live state of the cluster, from the events of the service.

import { locate } from "./api.js";

/** @typedef {import("./types.js").ClusterState} ClusterState */
/** @typedef {import("./types.js").EndedStage} EndedStage */

/** Ended stages are kept so long: a little longer than the map shows them. */
const KEPT_S = 70;

export class ClusterStore {
  /**
   * @param {(state: ClusterState) => void} onState each state, with all ended stages of the last minute
   * @param {(status: "connecting" | "live" | "lost", why: string) => void} onStatus
   */
  constructor(onState, onStatus) {
    this.onState = onState;
    this.onStatus = onStatus;
    /** @type {EndedStage[]} */
    this.ended = [];
    /** Seconds by which the service's clock is ahead of this page's. */
    this.clockOffset = 0;
    this.isFirst = true;
  }

  /** The service's clock. */
  now() {
    return performance.now() / 1000 + this.clockOffset;
  }

  open() {
    // The browser connects again by itself when the connection is lost.
    const source = new EventSource(locate("v1/cluster/events"));
    source.addEventListener("state", (event) => this.take(JSON.parse(event.data), true));
    source.addEventListener("change", (event) => this.take(JSON.parse(event.data), false));
    source.addEventListener("unavailable", (event) => this.onStatus("lost", JSON.parse(event.data).message));
    source.addEventListener("error", () => {
      this.onStatus(this.isFirst ? "connecting" : "lost", "No connection to the service; trying again.");
      // A browser gives up where it got an answer that is no stream.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 2000);
    });
  }

  /** @param {ClusterState} state @param {boolean} isWhole it has all that ended in the last minute */
  take(state, isWhole) {
    const offset = state.now_s - performance.now() / 1000;
    // An event that was late says less of the clock than one that was not.
    const isNew = this.isFirst || Math.abs(offset - this.clockOffset) > 5;
    this.clockOffset = isNew ? offset : Math.max(offset, this.clockOffset - 0.01);
    this.isFirst = false;
    const oldest = state.now_s - KEPT_S;
    this.ended = [...(isWhole ? [] : this.ended), ...state.ended].filter((stage) => stage.end_s > oldest);
    this.onStatus("live", "");
    this.onState({ ...state, ended: this.ended });
  }
}
