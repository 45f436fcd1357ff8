// The console: what is served, the requests of this page, and the live state of the cluster.

import { describeError, getJson } from "./api.js";
import { ClusterStore } from "./cluster_store.js";
import { showConnection, showTiles } from "./cluster_tiles.js";
import { Composer } from "./composer.js";
import { find } from "./dom.js";
import { Gantt } from "./gantt.js";
import { RequestList } from "./request_list.js";
import { ResultCard } from "./result_card.js";
import { VideoList } from "./video_list.js";

/** @typedef {import("./types.js").Model} Model */

const RETRY_MS = 2000;
/** Models come and go while the service runs. */
const MODELS_MS = 30_000;
/** Older results leave the page, which would grow without end otherwise. */
const MAX_RESULTS = 20;

const videos = new VideoList();
const composer = new Composer((wish) => {
  const card = new ResultCard(wish);
  const results = find("results", HTMLDivElement);
  results.prepend(card.element);
  while (results.children.length > MAX_RESULTS) {
    for (const image of results.lastElementChild?.querySelectorAll("img") ?? []) URL.revokeObjectURL(image.src);
    results.lastElementChild?.remove();
  }
  void card.run().then(() => (card.isVideo ? videos.follow() : undefined));
  if (card.isVideo) setTimeout(() => void videos.follow(), 500);
});

async function followModels() {
  let pause = MODELS_MS;
  try {
    const models = /** @type {Model[]} */ ((await getJson("v1/models")).data);
    composer.complain("");
    await composer.more.offer();
    composer.offer(models);
    const hasVideos = models.some((model) => model.output_modality === "video");
    const section = find("videos", HTMLElement);
    if (hasVideos && section.hidden) void videos.follow();
    section.hidden = find("videos-link", HTMLAnchorElement).hidden = !hasVideos;
  } catch (error) {
    composer.complain(describeError(error));
    pause = RETRY_MS;
  }
  setTimeout(() => void followModels(), pause);
}

const requests = new RequestList();
const store = new ClusterStore((state) => {
  gantt.show(state);
  showTiles(state);
  requests.show(state);
}, showConnection);
const gantt = new Gantt(() => store.now());

void followModels();
store.open();
