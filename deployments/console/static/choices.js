// What may be chosen in some fields, as the service itself describes its routes.

import { getJson } from "./api.js";

/** @typedef {{enum?: string[], const?: string, default?: unknown, items?: Schema, anyOf?: Schema[]}} Schema */
/** @typedef {{values: string[], usual: string}} Choice `usual` is the value of a request that names none */

/** Words for the values that are known here. Others are shown as the service names them. */
const WORDS = new Map([
  ["wait", "make it anyway"],
  ["degrade", "make it with less work"],
  ["refuse", "refuse it"],
  ["auto", "as usual"],
  ["exact", "exact"],
  ["high", "high (skips steps that change little)"],
  ["fast", "fast (skips more of them)"],
]);

/** The choices by the names of the fields. @returns {Promise<Record<string, Choice>>} */
export async function getChoices() {
  const routes = (await getJson("openapi.json")).paths;
  /** @param {string} route @returns {Record<string, Schema>} */
  const fieldsOf = (route) => routes[route].post.requestBody.content["application/json"].schema.properties;
  const request = fieldsOf("/v1/images/generations");
  const quotable = listValues(findItems(fieldsOf("/v1/quotes")["qualities"]));
  return {
    on_late: readChoice(request["on_late"]),
    // `default` means the same as `auto`.
    service_tier: readChoice(request["service_tier"], (value) => value !== "default"),
    // Other values of this field are those of other services, and have no effect.
    quality: readChoice(request["quality"], (value, usual) => value === usual || quotable.includes(value)),
  };
}

/** @param {Schema | undefined} schema @param {(value: string, usual: string) => boolean} isWanted @returns {Choice} */
function readChoice(schema, isWanted = () => true) {
  const usual = String(schema?.default ?? "");
  return { usual, values: listValues(schema).filter((value) => isWanted(value, usual)) };
}

/** The entries of a list that may also be missing. @param {Schema | undefined} schema */
function findItems(schema) {
  return schema?.items ?? schema?.anyOf?.find((one) => one.items !== undefined)?.items;
}

/** @param {Schema | undefined} schema */
function listValues(schema) {
  return schema?.enum ?? (schema?.const === undefined ? [] : [schema.const]);
}

/** @param {string} value */
export function describeChoice(value) {
  return WORDS.get(value) ?? value;
}
