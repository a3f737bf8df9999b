// Where the items of a graph are drawn: in layers, from top to bottom.
"use strict";

/** Layers by longest path, dummies where an edge passes a layer, a few sweeps against crossings, then x. */
function arrange({ items, edges }) {
  const incoming = new Map(items.map((item) => [item, []]));
  const outgoing = new Map(items.map((item) => [item, []]));
  for (const edge of edges) {
    incoming.get(edge.to).push(edge);
    outgoing.get(edge.from).push(edge);
  }
  const order = topological(items, incoming, outgoing);
  for (const item of order) item.layer = Math.max(0, ...incoming.get(item).map((edge) => edge.from.layer + 1));
  for (const item of [...order].reverse()) {
    // inputs stand right above what they go to
    const below = outgoing.get(item).map((edge) => edge.to.layer - 1);
    if (!incoming.get(item).length && below.length) item.layer = Math.min(...below);
  }
  const layers = [];
  const put = (thing) => (layers[thing.layer] ||= []).push(thing);
  order.forEach(put);
  const links = [];
  for (const edge of edges) {
    edge.way = [edge.from];
    for (let layer = edge.from.layer + 1; layer < edge.to.layer; layer++) {
      const dummy = { dummy: true, layer, wide: 10 };
      put(dummy);
      edge.way.push(dummy);
    }
    edge.way.push(edge.to);
    for (let k = 1; k < edge.way.length; k++) links.push([edge.way[k - 1], edge.way[k]]);
  }
  const above = new Map();
  const below = new Map();
  for (const [a, b] of links) {
    if (!below.has(a)) below.set(a, []);
    if (!above.has(b)) above.set(b, []);
    below.get(a).push(b);
    above.get(b).push(a);
  }
  for (let k = 0; k < layers.length; k++) layers[k] ||= [];
  layers.forEach((layer) => layer.forEach((thing, k) => { thing.at = k; thing.wide ??= BOX.wide; }));
  for (let sweep = 0; sweep < 8; sweep++) {
    const near = sweep % 2 ? below : above;
    for (const layer of sweep % 2 ? [...layers].reverse() : layers) {
      const middle = new Map(layer.map((thing) => {
        const others = near.get(thing) || [];
        return [thing, others.length ? sum(others, (o) => o.at) / others.length : thing.at];
      }));
      layer.sort((a, b) => middle.get(a) - middle.get(b) || a.at - b.at);
      layer.forEach((thing, k) => { thing.at = k; });
    }
  }
  for (const layer of layers) spread(layer, () => null);
  for (let sweep = 0; sweep < 10; sweep++) {
    const near = sweep % 2 ? below : above;
    for (const layer of sweep % 2 ? [...layers].reverse() : layers)
      spread(layer, (thing) => {
        const others = [...(near.get(thing) || []), ...(sweep > 5 ? (sweep % 2 ? above : below).get(thing) || [] : [])];
        return others.length ? sum(others, (o) => o.x) / others.length : null;
      });
  }
  const all = layers.flat();
  const left = Math.min(0, ...all.map((thing) => thing.x - thing.wide / 2));
  all.forEach((thing) => { thing.x -= left - 24; thing.y = 24 + thing.layer * (BOX.high + BOX.layer) + BOX.high / 2; });
  return {
    wide: Math.max(200, ...all.map((thing) => thing.x + thing.wide / 2 + 24)),
    high: 48 + layers.length * (BOX.high + BOX.layer) - BOX.layer,
  };
}

function topological(items, incoming, outgoing) {
  const left = new Map(items.map((item) => [item, incoming.get(item).length]));
  const ready = items.filter((item) => !left.get(item));
  const found = [];
  while (ready.length) {
    const item = ready.shift();
    found.push(item);
    for (const edge of outgoing.get(item)) {
      left.set(edge.to, left.get(edge.to) - 1);
      if (!left.get(edge.to)) ready.push(edge.to);
    }
  }
  return found;
}

/** Places of a layer from left to right: as near to what is wanted as the order allows. */
function spread(layer, wanted) {
  let edge = -Infinity;
  const goals = layer.map((thing) => wanted(thing) ?? thing.x ?? 0);
  layer.forEach((thing, k) => {
    thing.x = Math.max(goals[k], edge + thing.wide / 2);
    edge = thing.x + thing.wide / 2 + BOX.gap;
  });
  // pushed to the right by their neighbours: the whole row goes back by what it is off on average
  const off = sum(layer, (thing) => thing.x) - sum(goals);
  layer.forEach((thing) => { thing.x -= off / layer.length; });
}
