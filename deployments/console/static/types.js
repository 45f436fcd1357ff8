// The forms of what the service answers, as far as the console reads them (docs/api.md).

/** @typedef {{max_side: number, min_side: number, max_pixels: number, size_multiple: number, max_steps: number,
 *   max_outputs: number, max_prompt_chars: number, max_frames?: number, frame_multiple?: number}} Limits */
/** @typedef {{size: string, num_inference_steps: number, guidance_scale: number, num_frames?: number,
 *   fps?: number, strength?: number, masked_strength?: number}} Defaults */
/** The input images of a request.  @typedef {{name: string, files: File[], mask: File | null}} Images */
/** @typedef {{id: string, family: string, input_images: {min: number, max: number}, takes_mask: boolean,
 *   needs_mask: boolean, output_modality: string, limits: Limits, defaults: Defaults}} Model */

/** @typedef {{stage: "encode" | "diffuse" | "decode", workers: string[], degree: number, start_s: number,
 *   end_s: number, steps: number | null}} Span */
/** @typedef {{request_id: string, model: string, seed: number, width: number, height: number, created: number,
 *   queue_s: number, latency_s: number | null, slo_s: number | null, slo_met: boolean, retries: number,
 *   predicted_s?: number | null, reduced_steps?: number | null, quality?: string, skipped_steps?: number,
 *   timeline?: Span[], peak_memory_mb: number, tiled: boolean, index?: number,
 *   b64_json?: string}} Facts */
/** @typedef {{predicted_s: number | null, slo_s: number | null, slo_met: boolean | null, is_guess: boolean | null,
 *   error: {message: string, code: string} | null}} Quote */
/** @typedef {{eta_s?: number | null, queue_position?: number | null}} Prospect */
/** @typedef {{request_id: string, step: number, num_steps: number} & Prospect} Progress */
/** @typedef {{request_id: string, step: number, num_steps: number, partial_image_index: number, index: number,
 *   output_format: string, b64_json: string}} Preview */

/** @typedef {{id: string, status: "queued" | "in_progress" | "completed" | "failed", progress: number, model: string,
 *   prompt: string, size: string, num_frames: number, num_outputs: number, seed: number, created_at: number,
 *   error: {message: string, code: string} | null} & Prospect & Partial<Facts>} VideoJob */

/** @typedef {{plan_id: number, model: string, stages: string, degree: number, request_ids: string[], start_s: number,
 *   end_s: number}} Plan */
/** @typedef {{worker_id: string, node_id: string, alive: boolean, placement: string, plans: Plan[],
 *   reserved_until_s: number | null, coreless: boolean, aside_until_s: number | null, handoff: {used_bytes: number, capacity_bytes: number} | null}} Worker */
/** @typedef {{request_id: string, model: string, size: string, num_steps: number, steps_done: number,
 *   running: boolean, arrival_s: number, deadline_s: number}} WaitingRequest */
/** @typedef {{model: string, size: string, waiting: number, running: number, oldest_s: number | null}} RequestClass */
/** @typedef {{number: number, plan_id: number, model: string, stage: "E" | "D" | "C", workers: string[],
 *   request_ids: string[], start_s: number, end_s: number, steps: number | null}} EndedStage */
/** @typedef {{at_s: number, kind: string, text: string}} Notice */
/** @typedef {{now_s: number, workers: Worker[], requests: WaitingRequest[], num_requests: number,
 *   classes: RequestClass[], attainment: Record<string, {on_time: number, ended: number, overdue: number,
 *   predicted: number, predicted_well: number}>, notices: Notice[],
 *   ended: EndedStage[]}} ClusterState */

export {};
