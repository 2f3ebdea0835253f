"use strict";
// Elements of the page. The scripts of this folder run as one, in the order that api/pages/__init__.py gives.
// Values from documents, servers and links become text and properties, never markup.

const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "width") made.style.width = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const counted = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(share * 100).toFixed(1)}%`;
